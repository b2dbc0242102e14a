"""Triton kernels on one card: correctness against the references, time against eager, torch.compile and liger-kernel.

    python benchmarks/gpu_kernels.py                  # on a machine with a CUDA device: at most six minutes
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --interpret   # anywhere: the correctness half, tiny shapes

Shapes of a layer of SmolLM2-135M at 8,192 tokens and of Llama 3 8B at 4,096; forward and backward, bfloat16, the
median of `--rounds` with the second-level cache flushed by a write between two. Rivals that are not installed are left
out. Exit code 1 when a kernel's values or gradients differ from the float32 reference by more than rounding. Without a
device, nothing is timed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skimp.kernels.forms import kernel

SECONDS = 360
#: name -> (tokens, hidden, MLP width, vocabulary)
SHAPES = {"135m": (8192, 576, 1536, 49152), "8b": (4096, 4096, 14336, 128256)}
TINY = {"tiny": (6, 24, 40, 50)}
Call = Callable[..., Tensor]


def rows(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """kernel -> (tensors, options); the floating ones are differentiated."""
    tokens, hidden, width, vocab = sizes
    g = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g, device=device) * scale).to(dtype)

    x, gain = draw(tokens, hidden), draw(hidden, scale=0.1) + 1
    gate, up = draw(tokens, width), draw(tokens, width)
    labels = torch.randint(vocab, (tokens,), generator=g, device=device)
    logits = draw(tokens, vocab, scale=3.0)
    return {
        "rms_norm": ([x, gain], {"eps": 1e-5}),
        "layer_norm": ([x, gain, draw(hidden)], {"eps": 1e-5}),
        "swiglu": ([gate, up], {}),
        "geglu": ([gate, up], {"by_tanh": True}),
        "softmax": ([logits], {}),
        "cross_entropy": ([logits, labels], {}),
    }


def eager(name: str) -> Call:
    """As HF's models write it."""
    F = torch.nn.functional

    def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    calls: dict[str, Call] = {
        "rms_norm": rms,
        "layer_norm": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
        "swiglu": lambda a, b: F.silu(a) * b,
        "geglu": lambda a, b, by_tanh: F.gelu(a, approximate="tanh" if by_tanh else "none") * b,
        "softmax": lambda x: torch.softmax(x, -1),
        "cross_entropy": lambda x, y: F.cross_entropy(x.float(), y, reduction="none"),
    }
    return calls[name]


def liger(name: str) -> Call | None:
    """Liger's kernel, where the package is there and has one."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import functional as given

    calls: dict[str, Call] = {
        "rms_norm": lambda x, w, eps: given.liger_rms_norm(x, w, eps, in_place=False),
        "layer_norm": lambda x, w, b, eps: given.liger_layer_norm(x, w, b, eps),
        "swiglu": lambda a, b: given.liger_swiglu(a, b),
        "geglu": lambda a, b, by_tanh: given.liger_geglu(a, b),
        "softmax": lambda x: given.liger_softmax(x),
        # its gradient is written over the logits: it gets a copy, as whoever still needs them has to make one
        "cross_entropy": lambda x, y: given.liger_cross_entropy(x.clone(), y),
    }
    return calls[name]


def run(call: Call, tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Value and gradients of the floating inputs; upstream from -1 to 1, as softmax is blind to equal ones."""
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    y = call(*leaves, **options)
    upstream = torch.linspace(-1.0, 1.0, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    grads = torch.autograd.grad(y, [t for t in leaves if t.requires_grad], upstream)
    return [y.detach(), *grads]


def gap(name: str, tensors: list[Tensor], options: dict[str, Any]) -> float:
    """The largest difference of value and gradients from the float32 reference, of the largest number of each."""
    found = run(kernel(name, "triton"), tensors, options)
    wanted = run(kernel(name, "reference"), [t.float() if t.is_floating_point() else t for t in tensors], options)
    # A gradient of softmax is the difference of two numbers of p's size, and p is kept rounded.
    least = wanted[0].abs().max() if name == "softmax" else torch.zeros((), device=wanted[0].device)
    scales = [torch.maximum(b.abs().max(), least) for b in wanted]
    return max(float((a.float() - b).abs().max() / s) for a, b, s in zip(found, wanted, scales, strict=True))


def milliseconds(call: Call, tensors: list[Tensor], options: dict[str, Any], rounds: int) -> float:
    """Median of forward and backward on the device's own clock."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    for _ in range(3):
        run(call, tensors, options)
    times = []
    for _ in range(rounds):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(call, tensors, options)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--interpret", action="store_true", help="correctness alone, through Triton's interpreter")
    args = parser.parse_args()
    if not (args.interpret or torch.cuda.is_available()):
        print("no CUDA device; --interpret under TRITON_INTERPRET=1 checks the kernels without one")
        return 0
    began, wrong = time.monotonic(), 0
    device = "cpu" if args.interpret else "cuda"
    dtypes = (torch.float32, torch.bfloat16)
    print("\nagainst the float32 reference, of the largest number (float32 within 1e-5, bfloat16 within 2e-2)")
    for shape, sizes in (TINY if args.interpret else SHAPES).items():
        for dtype in dtypes:
            for name, (tensors, options) in rows(sizes, dtype, device).items():
                off = gap(name, tensors, options)
                right = off < (1e-5 if dtype == torch.float32 else 2e-2)
                wrong += not right
                print(f"{shape:6} {name:14} {str(dtype)[6:]:9} {off:.1e}{'' if right else '  WRONG'}", flush=True)
    if args.interpret:
        return int(wrong > 0)
    print(f"\nforward and backward in bfloat16, milliseconds, {torch.cuda.get_device_name()}")
    print(f"{'':6} {'':14} {'skimp':>9} {'eager':>9} {'compile':>9} {'liger':>9}")
    for shape, sizes in SHAPES.items():
        for name, (tensors, options) in rows(sizes, torch.bfloat16, device).items():
            calls = {"skimp": kernel(name, "triton"), "eager": eager(name), "compile": torch.compile(eager(name))}
            calls |= {} if liger(name) is None else {"liger": liger(name)}
            cells = []
            for who in ("skimp", "eager", "compile", "liger"):
                left = SECONDS - (time.monotonic() - began)
                known = who in calls and (who != "compile" or left > 60)
                cells.append(
                    f"{milliseconds(calls[who], tensors, options, args.rounds):9.3f}" if known else f"{'-':>9}"
                )
            print(f"{shape:6} {name:14} {' '.join(cells)}", flush=True)
            if time.monotonic() - began > SECONDS:
                print("six minutes are over; the rest is left out")
                return int(wrong > 0)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
