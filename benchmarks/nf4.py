"""Products with an NF4 weight against bitsandbytes and against the dense weight, on this CPU.

    python benchmarks/nf4.py            # the linear layers of SmolLM2-135M at 1, 64 and 2,048 tokens (under a minute)
    python benchmarks/nf4.py --large    # 4,096 x 4,096 as well

Forward, and forward with the gradient of the input, as a frozen base in training has it. Rows take turns; the figure is
the median of `--repeat` rounds. Bits a weight count everything that stands for the layers: codes, maxima, maxima of
maxima, offsets. Exit code 1 when a ratio is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import measure
from skimp.core.codecs import NF4
from skimp.core.coded_linear import CodedLinear
from skimp.core.forms import reference_only
from skimp.kernels.native.nf4 import load

SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536)]
#: How many of each shape a block has.
TIMES = {(576, 576): 2, (192, 576): 2, (1536, 576): 2, (576, 1536): 1, (4096, 4096): 1}
TOKENS = (1, 64, 2048)
DENSE, THEIRS, OURS, REFERENCE = "dense float32", "bitsandbytes", "skimp", "skimp, reference"


def makers(weight: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Row -> x -> x W'."""
    layer = CodedLinear(weight.shape[1], weight.shape[0], NF4())
    layer.take(weight)
    found: dict[str, Callable[[Tensor], Tensor]] = {
        DENSE: lambda x: torch.nn.functional.linear(x, weight),
        OURS: layer,
    }

    def reference(x: Tensor) -> Tensor:
        with reference_only():
            return layer(x)

    found[REFERENCE] = reference
    try:
        import bitsandbytes
    except ImportError:
        return found
    packed, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    found[THEIRS] = lambda x: bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state)
    return found


def once(call: Callable[[Tensor], Tensor], x: Tensor, g: Tensor, backward: bool, reference: bool) -> float:
    """Seconds of one product, with its gradient where asked."""
    begin = time.perf_counter()
    # Backward runs on a thread of autograd's: the reference is asked for around both.
    with reference_only() if reference else nullcontext():
        if backward:
            y = call(x.requires_grad_())
            y.backward(g)
            x.grad = None
        else:
            with torch.no_grad():
                call(x)
    return time.perf_counter() - begin


def measured(shapes: list[tuple[int, int]], tokens: int, backward: bool, repeat: int) -> dict[str, float]:
    """Row -> seconds of one block's layers: medians by shape, as often as a block has it, summed."""
    total: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        rows = makers(torch.randn(shape, generator=generator) * 0.02)
        x = torch.randn(tokens, shape[1], generator=generator)
        g = torch.randn(tokens, shape[0], generator=generator)
        taken: dict[str, list[float]] = {name: [] for name in rows}
        for turn in range(repeat + 2):
            for name in rows if turn % 2 else reversed(rows):
                seconds = once(rows[name], x, g, backward, name == REFERENCE)
                if turn > 1:
                    taken[name].append(seconds)
        for name, found in taken.items():
            total[name] = total.get(name, 0.0) + TIMES[shape] * measure.middle(found)
    return total


def bits(shapes: list[tuple[int, int]]) -> float:
    """Bits a weight of a block's layers, everything counted."""
    layers = [CodedLinear(inputs, outputs, NF4(), device="meta") for outputs, inputs in shapes]
    pairs = [(TIMES[s], layer.weight) for s, layer in zip(shapes, layers, strict=True)]
    return 8 * sum(n * w.nbytes for n, w in pairs) / sum(n * w.numel() for n, w in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9, help="rounds of a figure")
    parser.add_argument("--large", action="store_true", help="4,096 x 4,096 as well")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    native = load()
    print(f"native kernels: {'yes' if native else 'no (python -m skimp.kernels.native)'}\n{measure.machine()}\n")
    groups = {"SmolLM2-135M, one block": SHAPES, **({"4,096 x 4,096": [(4096, 4096)]} if args.large else {})}
    lines, claims, plain = [], [], {}
    for label, shapes in groups.items():
        for tokens in TOKENS:
            for backward in (False, True):
                repeat = args.repeat if tokens > 64 else 4 * args.repeat
                found = measured(shapes, tokens, backward, repeat)
                what = f"{label}, {tokens:,} tokens, {'forward and dx' if backward else 'forward'}"
                plain[what] = found
                theirs = found.get(THEIRS, float("nan"))
                lines.append(
                    [what, *(f"{1e3 * found[n]:.2f}" if n in found else "–" for n in (DENSE, THEIRS, OURS, REFERENCE)),
                     f"{theirs / found[OURS]:.2f}", f"{theirs / found[REFERENCE]:.2f}"]
                )  # fmt: skip
                claims.append((f"{what}: speed to bitsandbytes", theirs / found[OURS], ">=", 1.0))
                if tokens == 2048:
                    claims.append((f"{what}: reference's speed to it", theirs / found[REFERENCE], ">=", 0.9))
    print(measure.table(["milliseconds", DENSE, THEIRS, OURS, REFERENCE, "skimp ×", "reference ×"], lines))
    size = bits(SHAPES)
    print(f"\n{size:.3f} bits a weight of SmolLM2-135M's linear layers, all told")
    said, good = measure.verdicts([*claims, ("bits a weight", size, "<=", 5.0)])
    print("\n".join(said))
    figures: dict[str, Any] = {"rows": plain, "bits": size, "verdicts": said, "met": good}
    measure.write_json(args.json, {**figures, "machine": measure.machine()})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
