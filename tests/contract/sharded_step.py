"""FSDP2 on a few gloo processes: `python sharded_step.py RANK WORLD FOLDER` runs every update rule on one rank.

The model has what sharding makes hard: odd sizes, rows that do not divide, a matrix of one row (all processes but
the first hold none of it), shards that begin inside a block of 256, and tensors too small for 8-bit states. Every
process computes the same batch, so the mean of the gradients is each of them, bit for bit, and a sharded step can be
held against an unsharded one. Process 0 writes what it found to FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, ROWS, SEQ, VOCAB, WIDTH = 3, 4, 16, 131, 40
RULES = {"adamw": torch.float32, "adamw-bf16": torch.bfloat16, "adamw8bit": torch.float32, "adamw8bit-bf16": None}
RULES |= {"lion": torch.float32, "lion-bf16": torch.bfloat16, "adamw4bit": torch.float32, "spam": torch.float32}
#: Blocks are rows, which sharding never cuts; norm gains have a moment a number here, as a whole one does not shard.
RULES |= {"adam-mini": torch.float32, "adam-mini-bf16": torch.bfloat16}


class Odd(nn.Module):
    """A causal model without attention, in which every parameter gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(VOCAB, WIDTH)  # 131 rows: 66 and 65; the second shard begins inside a block
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.row = nn.Parameter(torch.randn(1, WIDTH * 125) * 0.01)  # one row: the second process holds nothing
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        hidden = hidden + self.block(hidden) + self.row.view(WIDTH, 125).sum(1)
        logits = self.head(hidden)[:, :-1].float()
        return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def make(rule: str, shard: Callable[[nn.Module], None]) -> tuple[nn.Module, Any]:
    from skimp.core.registry import load
    from skimp.optim import decay_groups, role_groups, roles

    net = Odd().to(RULES[rule] or torch.bfloat16)
    shard(net)
    make_rule = load(rule if rule == "adamw-bf16" else rule.removesuffix("-bf16"), "update rule")
    options = {"every": 3, "warmup": 1, "after": 1} if rule == "spam" else {}
    if rule.startswith("adam-mini"):
        return net, make_rule(role_groups(net.named_parameters(), 0.1, roles(net)), lr=1e-2, vectors="element")
    return net, make_rule(decay_groups(net.named_parameters(), 0.1), lr=1e-2, **options)


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))


def take(net: nn.Module, optimizer: Any, steps: range, clip: float | None = None) -> list[float]:
    """So many steps; returns the gradient norms."""
    norms = []
    for step in steps:
        net(batch(step)).backward()
        if clip is not None:
            norm: Any = nn.utils.clip_grad_norm_(net.parameters(), clip)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def weights(net: nn.Module) -> dict[str, Tensor]:
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in net.named_parameters()}
    return {name: weight.detach().clone() for name, weight in whole.items()}


def local_bytes(optimizer: Any) -> int:
    tensors = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)


def save(net: nn.Module, optimizer: Any, folder: Path) -> None:
    """torch's own checkpoint of model and optimizer, each process its part."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def restore(net: nn.Module, optimizer: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(net, optimizer)
    held = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])


def one_rule(rule: str, shard: Callable[[nn.Module], None], folder: Path | None) -> dict[str, Any]:
    """Weights after two and three steps, plain and clipped; and, with a folder, saved after two and resumed."""
    net, optimizer = make(rule, shard)
    start = weights(net)
    take(net, optimizer, range(2))
    two = weights(net)
    if folder is not None:
        save(net, optimizer, folder / rule)
    take(net, optimizer, range(2, STEPS))
    named = dict(net.named_parameters())
    found: dict[str, Any] = {"start": start, "two": two, "three": weights(net), "bytes": local_bytes(optimizer)}
    found["table"] = sum(row.state_bytes for row in optimizer.table())
    optimizer.assert_effect({n: p.detach() * 0 for n, p in named.items()}, {n: p.detach() for n, p in named.items()})
    net, optimizer = make(rule, shard)
    found["norms"] = take(net, optimizer, range(STEPS), clip=0.05)
    found["clipped"] = weights(net)
    if folder is not None:
        net, optimizer = make(rule, shard)
        take(net, optimizer, range(5, 6))  # other weights and states, to be replaced
        restore(net, optimizer, folder / rule)
        take(net, optimizer, range(2, STEPS))
        found["resumed"] = weights(net)
    return found


def even(shard: Callable[[nn.Module], None], folder: Path, resume: bool = False) -> Tensor:
    """8-bit states whose blocks lie alike on any number of processes: shards of 16 blocks each. Three steps; saved
    after two, or taken up from there."""
    from skimp.optim import AdamW8bit

    torch.manual_seed(12)
    net = nn.Linear(128, 64, bias=False)
    shard(net)
    optimizer = AdamW8bit(net.named_parameters(), lr=1e-2)
    for step in range(STEPS):
        if step < 2 and resume:
            continue
        if step == 2:
            (restore if resume else save)(net, optimizer, folder / "even")
        net(torch.ones(2, 128) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)["weight"]


def main(rank: int, world: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    mesh = dist.init_device_mesh("cpu", (world,))

    def shard(net: nn.Module) -> None:
        fully_shard(net.get_submodule("block"), mesh=mesh)
        fully_shard(net, mesh=mesh)

    found: dict[str, Any] = {rule: one_rule(rule, shard, folder) for rule in RULES}
    found["even"] = even(lambda net: fully_shard(net, mesh=mesh) and None, folder)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
