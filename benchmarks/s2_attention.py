"""Block-sparse attention against PyTorch's dense one on this CPU: forward and backward at rising sparsity.

    python benchmarks/s2_attention.py                    # 16,384 tokens, 9 heads of 64; under two minutes on two cores
    python benchmarks/s2_attention.py --seq 4096         # seconds

Float32, one row; the same tensors for all. Each figure is the best of `--rounds` runs; the dense one is run once, for
half a minute. Gradients of the sparse form are those of masked attention (`tests/kernels/test_sparse_attention.py`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.sparse_attention import sparse_attention


def seconds(call: Callable[[], Tensor], upstream: Tensor, rounds: int) -> tuple[float, float]:
    """(forward, backward) of the fastest round."""
    best = (float("inf"), float("inf"))
    for _ in range(rounds):
        start = time.perf_counter()
        y = call()
        middle = time.perf_counter()
        y.backward(upstream)
        best = min(best, (middle - start, time.perf_counter() - middle), key=sum)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    shape = (1, args.heads, args.seq, args.dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape)
    blocks = -(-args.seq // 64)
    everything = args.heads * blocks * (blocks + 1) // 2
    print(f"{args.seq:,} tokens, {args.heads} heads of {args.dim}, float32, {torch.get_num_threads()} threads")
    forward, backward = seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), upstream, 1)
    dense = forward + backward
    row = "{:32} {:>9} {:>9} {:>9} {:>9}"
    print(row.format("", "blocks", "forward", "backward", "times"))
    print(row.format("dense (PyTorch)", "100 %", f"{forward:.2f} s", f"{backward:.2f} s", "1.00"))
    for local, stride in ((8, 2), (8, 4), (16, 8), (8, 8), (8, 16)):
        pattern = BlockPattern(args.heads, 64, local, stride)
        forward, backward = seconds(lambda p=pattern: sparse_attention(q, k, v, p), upstream, args.rounds)
        name = f"blocks of 64, window {local}, stride {stride}"
        share = pattern.visited(blocks) / everything
        times = dense / (forward + backward)
        print(row.format(name, f"{share:.0%}", f"{forward:.2f} s", f"{backward:.2f} s", f"{times:.2f}"))


if __name__ == "__main__":
    main()
