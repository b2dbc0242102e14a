"""Run a little of everything a training step runs, so that a baseline measured after it is the step's own.

The first matrix product loads MKL's kernels, the first parallel region starts the threads, the first backward the
autograd engine: tens of megabytes of code and buffers that no tensor accounts for. They belong to the process.
"""

from __future__ import annotations

import torch
from torch import nn

from skimp.core.memory.process import give_back, resident


def warm_baseline() -> int:
    """Warm the process and return its resident bytes.

    Everything allocated here is small (under 45 MB) and freed again before the measurement.
    """
    with torch.random.fork_rng(devices=[]):
        x = torch.ones(256, 512, requires_grad=True)
        # MKL keeps a packing buffer per thread, sized by the largest product it has met: some 16 MB each.
        torch.ones(256, 1024) @ torch.ones(1024, 8192)
        layers = nn.Sequential(nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 512), nn.LayerNorm(512))
        hidden = layers(x)
        heads = hidden.view(1, 256, 8, 64).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        table = torch.zeros(1024, 512)
        logits = torch.softmax(mixed.transpose(1, 2).reshape(256, 512) @ table.T, -1)
        logits.square().mean().backward()
        table.index_add_(0, torch.zeros(256, dtype=torch.int64), torch.ones(256, 512))
        for p in layers.parameters():
            if p.grad is not None:
                torch.linalg.vector_norm(p.grad)
    del x, layers, hidden, heads, mixed, table, logits, p
    give_back()
    return resident().now
