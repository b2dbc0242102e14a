"""The fused linear cross-entropy against the plain head: bytes beyond inputs and returned gradients, and seconds.

    python benchmarks/loss_head.py    # 4,096 tokens, d 576, vocabulary 128,000: under 2 minutes
    python benchmarks/loss_head.py --tokens 512 --vocab 16000    # seconds

Float32, forward and backward, gradients of hidden states and weight. Plain: `F.cross_entropy(hidden @ weight.T,
labels)`. Bytes are those that c10's allocator gave out at the highest moment (torch's own profiler, which knows nothing
of skimp), less the two gradients that both return. Runs alternate; each figure is the fastest of `--rounds`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from skimp.core.memory.oracle import witness
from skimp.losses import linear_cross_entropy


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The head as every model has it."""
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden).mul_(0.5).requires_grad_()
    weight = torch.randn(args.vocab, args.hidden).mul_(0.05).requires_grad_()
    labels = torch.randint(args.vocab, (args.tokens,))
    returned = 4 * (hidden.numel() + weight.numel())
    forms: dict[str, Callable[..., Tensor]] = {"fused": linear_cross_entropy, "plain": plain}
    extra: dict[str, int] = {}
    seconds = dict.fromkeys(forms, float("inf"))
    losses: dict[str, float] = {}
    gradients: dict[str, tuple[Tensor, Tensor]] = {}

    def step(name: str) -> None:
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        loss = forms[name](hidden, weight, labels)
        loss.backward()
        seconds[name] = min(seconds[name], time.perf_counter() - start)
        losses[name] = float(loss.detach())

    for number in range(args.rounds):
        for name in forms:
            if number == 0:  # watched for bytes; the profiler only sees allocations, a few hundred of them
                extra[name] = witness(lambda name=name: step(name))[1].peak - returned
                assert hidden.grad is not None
                assert weight.grad is not None
                gradients[name] = (hidden.grad, weight.grad[::257].clone())
            else:
                step(name)
    gaps = [
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients["fused"], gradients["plain"], strict=True)
    ]
    print(f"{args.tokens:,} tokens, d {args.hidden}, vocabulary {args.vocab:,}, {torch.get_num_threads()} threads")
    for name in forms:
        megabytes = extra[name] / 1e6
        print(
            f"{name}: {megabytes:,.1f} MB beyond inputs and gradients, {seconds[name]:.2f} s, loss {losses[name]:.6f}"
        )
    share, ratio = extra["fused"] / extra["plain"], seconds["fused"] / seconds["plain"]
    print(f"bytes {share:.4f} of plain (0.03 at most), time {ratio:.2f} (1.0 at most)")
    print(f"gradients differ by {gaps[0]:.1e} (hidden) and {gaps[1]:.1e} (weight) of the largest")


if __name__ == "__main__":
    main()
