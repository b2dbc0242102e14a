"""One process of a two-process FSDP2 run: `python sharded_step.py RULE RANK WORLD STORE OUT` (WORLD 1: no
sharding).

Each process trains on its half of every batch; FSDP2 averages gradients over processes, so the half's mean
loss is what it differentiates. Process 0 writes losses and full weights to OUT.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

STEPS, ROWS, SEQ, VOCAB = 3, 4, 16, 64


def model() -> nn.Module:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).float().train()


def main(rule: str, rank: int, world: int, store: str, out: str) -> None:
    import skimp.optim

    torch.set_num_threads(1)
    net: Any = model()
    if world > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        mesh = dist.init_device_mesh("cpu", (world,))
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = getattr(skimp.optim, rule)(net.named_parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        ids = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(world)[rank]
        net(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in net.named_parameters()}
    state_numbers = sum(
        getattr(v, "_local_tensor", v).numel()
        for s in optimizer.state.values()
        for v in s.values()
        if torch.is_tensor(v)
    )
    if rank == 0:
        torch.save({"weights": {n: w.detach().clone() for n, w in whole.items()}, "state": state_numbers}, out)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    rule, rank, world, store, out = sys.argv[1:]
    main(rule, int(rank), int(world), store, out)
