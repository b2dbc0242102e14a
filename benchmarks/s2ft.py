"""Backward of S2FT against LoRA's at as many trained numbers, in blocks of SmolLM2's shapes.

    python benchmarks/s2ft.py            # 2 blocks, 512 tokens, 9 rounds (under a minute)
    python benchmarks/s2ft.py --tokens 128 --rounds 3  # smoke

Hidden 576, inner width 1,536, 9 query and 3 key/value heads of 64, random float32 weights. LoRA has rank 16 on all
seven linear layers, 162,816 numbers a block; S2FT one query head's columns of o and 219 channels' columns of down,
163,008.
Rounds alternate in order; each times forward and backward of every row once, and ratios are medians over rounds of the
ratio within a round. The row without an adapter has frozen weights and the gradient of its input alone: no fine-tuning
goes below it. Saved bytes are the storages kept for backward, weights left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

import measure
from skimp.adapters import S2FT, LoRA, S2FTSpec, Spec
from skimp.adapters.s2ft_select import choose
from skimp.core.structure import read_structure
from skimp.kernels.apply import Fused

SLICED, GATHERED = "S2FT, moved", "S2FT, gathered"
LOW, PEFT, FLOOR = "LoRA r 16", "LoRA r 16, PEFT", "no adapter"
CHANNELS = 219


def blocks(count: int) -> Any:
    """A seeded model of `count` blocks of SmolLM2-135M's shapes and a small vocabulary."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=576, intermediate_size=1536, num_hidden_layers=count, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).requires_grad_(False)


def rows(count: int) -> dict[str, Any]:
    """Name -> model with its adapter; fused layers in skimp's rows."""
    found: dict[str, Any] = {}
    for name in (SLICED, GATHERED, LOW, FLOOR):
        model = blocks(count)
        if name in (SLICED, GATHERED):
            # As many channels in every block, which a draw over all blocks gives on average only.
            spec = S2FTSpec(o=1 / 9, d=CHANNELS / 1536, select="weight")
            slices = choose(model, read_structure(model), spec)
            S2FT(model, replace(spec, select="random", permute=name == SLICED, slices=slices))
        elif name == LOW:
            LoRA(model, Spec(r=16))
        Fused(model)
        found[name] = model
    try:
        import peft
    except ImportError:
        return found
    model = blocks(count)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    return {**found, PEFT: model}


def trained(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def timed(model: Any, x: torch.Tensor, upstream: torch.Tensor) -> tuple[float, float]:
    """Seconds of one forward and of its backward."""
    hidden = x.clone().requires_grad_()
    start = time.perf_counter()
    y = model.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    middle = time.perf_counter()
    y.backward(upstream)
    end = time.perf_counter()
    for p in model.parameters():
        p.grad = None
    return middle - start, end - middle


def kept(model: Any, x: torch.Tensor) -> int:
    """Bytes of storages kept for backward beside parameters and the input."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model.model(inputs_embeds=x.requires_grad_(), use_cache=False).last_hidden_state
    del y
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the one row")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    models = rows(args.blocks)
    x, upstream = torch.randn(2, 1, args.tokens, 576).unbind(0)
    for model in models.values():
        timed(model, x, upstream)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(args.rounds):
        for name in list(models)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(timed(models[name], x, upstream))

    def ratio(name: str, to: str, part: Callable[[tuple[float, float]], float]) -> float:
        return measure.middle([part(a) / part(b) for a, b in zip(times[name], times[to], strict=True)])

    lines = []
    for name, model in models.items():
        forward, backward = (measure.middle([t[i] for t in times[name]]) for i in (0, 1))
        lines.append([
            name, f"{trained(model) // args.blocks:,}", f"{1e3 * forward:.1f}", f"{1e3 * backward:.1f}",
            f"{ratio(name, LOW, lambda t: t[1]):.2f}", f"{ratio(name, LOW, sum):.2f}",
            f"{kept(model, x.clone()) / args.blocks / 1e6:.2f}",
        ])  # fmt: skip
    print(f"{args.blocks} blocks, {args.tokens} tokens, {args.rounds} rounds\n{measure.machine()}\n")
    head = ["row", "trained / block", "forward ms", "backward ms", "backward × LoRA", "both × LoRA", "kept MB / block"]
    print(measure.table(head, lines))
    claims = [("backward of S2FT to LoRA's", ratio(SLICED, LOW, lambda t: t[1]), "<=", 0.8)]
    if PEFT in models:
        claims.append(("backward of S2FT to that of PEFT's LoRA", ratio(SLICED, PEFT, lambda t: t[1]), "<=", 0.8))
    said, good = measure.verdicts(claims)
    print("\n" + "\n".join(said))
    measure.write_json(args.json, {"rows": lines, "verdicts": said, "met": good, "machine": measure.machine()})


if __name__ == "__main__":
    main()
