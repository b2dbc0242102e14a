"""One optimizer step on the tensors of SmolLM2-135M, against torch, bitsandbytes and torchao, on this CPU.

    python benchmarks/optim_step.py             # a quarter of the layers and of the table: about four minutes
    python benchmarks/optim_step.py --share 1   # all of them

Shapes and gradients are the model's own (random numbers of each shape; a step's time does not hang on their values).
Every row is the median of `--repeat` steps after two that are not counted; a peer that is not installed is left out and
named. torchao compiles before its first step: it runs in a process of its own, which is given `--patience` seconds. The
error of the states is that of the move they give, against float32 moments over the same ten gradients. Exit code 1 when
a ratio is missed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import measure
from skimp.core.forms import reference_only
from skimp.core.newton_schulz import newton_schulz
from skimp.optim import AdamW, AdamW4bit, AdamW8bit

#: Hidden 576, 9 heads and 3 of keys, MLP 1,536, 30 layers, vocabulary 49,152, tied.
LAYER = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536), (576,), (576,)]
LAYERS, TABLE = 30, (49152, 576)
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def shapes(share: int) -> list[tuple[int, ...]]:
    """All tensors, or an eighth of the layers and of the table's rows."""
    return [(TABLE[0] // share, TABLE[1]), *(LAYER * max(1, LAYERS // share)), (576,)]


def parameters(sizes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(size, generator=g) * 0.02) for size in sizes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=g) * 1e-3
    return made


def seconds(step: Callable[[], Any], repeat: int) -> float:
    """The median of `repeat` calls after two."""
    taken = []
    for i in range(repeat + 2):
        begin = time.perf_counter()
        step()
        if i > 1:
            taken.append(time.perf_counter() - begin)
    return measure.middle(taken)


def makers() -> dict[str, tuple[Callable[[list[nn.Parameter]], Any], bool]]:
    """Row -> (how the optimizer is made, whether the references run instead of the native kernels)."""
    found: dict[str, tuple[Callable[[list[nn.Parameter]], Any], bool]] = {
        "torch AdamW, fused": (lambda ps: torch.optim.AdamW(ps, fused=True, **OPTIONS), False),
        "torch AdamW, foreach": (lambda ps: torch.optim.AdamW(ps, foreach=True, **OPTIONS), False),
        "skimp AdamW": (lambda ps: AdamW(ps, **OPTIONS), False),
        "skimp 8-bit": (lambda ps: AdamW8bit(ps, **OPTIONS), False),
        "skimp 8-bit, reference": (lambda ps: AdamW8bit(ps, **OPTIONS), True),
        "skimp 4-bit": (lambda ps: AdamW4bit(ps, **OPTIONS), False),
        "skimp 4-bit, reference": (lambda ps: AdamW4bit(ps, **OPTIONS), True),
    }
    bitsandbytes = optional("bitsandbytes")
    if bitsandbytes is not None:
        found["bitsandbytes 8-bit"] = (lambda ps: bitsandbytes.optim.AdamW8bit(ps, **OPTIONS), False)
    return found


def torchao_makers() -> dict[str, tuple[Callable[[list[nn.Parameter]], Any], bool]]:
    """The same for torchao's rules; none where it is not installed."""
    torchao = optional("torchao.optim")
    if torchao is None:
        return {}
    return {
        "torchao 8-bit": (lambda ps: torchao.AdamW8bit(ps, **OPTIONS), False),
        "torchao 4-bit": (lambda ps: torchao.AdamW4bit(ps, **OPTIONS), False),
    }


def optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        print(f"left out: {module} ({error})")
        return None


def state_bytes(optimizer: Any) -> int:
    """Bytes of all state tensors; of a tensor subclass those of its parts."""

    def parts(t: Tensor) -> int:
        names = getattr(t, "tensor_attrs", None)
        return sum(getattr(t, n).nbytes for n in names) if names else t.nbytes

    states = optimizer.state.values()
    return sum(parts(v) for s in states for v in s.values() if isinstance(v, Tensor) and v.numel() > 1)


def error(make: Callable[[list[nn.Parameter]], Any]) -> float:
    """‖move − float32's‖ / ‖float32's‖ of the eleventh step on gradients of one spectrum."""

    def moved(build: Callable[[list[nn.Parameter]], Any]) -> Tensor:
        p = nn.Parameter(torch.zeros(1024, 512))
        optimizer = build([p])
        g = torch.Generator().manual_seed(3)
        scale = torch.exp(torch.randn(1024, 1, generator=g)) * torch.exp(0.5 * torch.randn(1, 512, generator=g)) * 1e-3
        mean = torch.randn(1024, 512, generator=g)
        for _ in range(11):
            before = p.detach().clone()
            p.grad = (mean + torch.randn(1024, 512, generator=g)) * scale
            optimizer.step()
        return p.detach() - before

    exact = moved(lambda ps: torch.optim.AdamW(ps, fused=True, **OPTIONS))
    return float((moved(make) - exact).norm() / exact.norm())


def orthogonalisation(share: int, repeat: int) -> dict[str, float]:
    """Seconds for all hidden matrices: stacked by shape, one by one, and as the released loop does it, in bfloat16."""
    sizes = [s for s in shapes(share)[1:] if len(s) == 2]
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for size in sizes:
        groups.setdefault(size, []).append(torch.randn(size))

    def stacked() -> None:
        for size, ms in groups.items():
            at_once = max(1, 2**21 // (size[0] * size[1]))
            for i in range(0, len(ms), at_once):
                newton_schulz(torch.stack(ms[i : i + at_once]))

    def loop(dtype: torch.dtype) -> None:
        a, b, c = (3.4445, -4.7750, 2.0315)
        for ms in groups.values():
            for m in ms:
                x = m.to(dtype)
                x = x.mT if x.shape[0] > x.shape[1] else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.mT
                    x = a * x + (b * gram + c * gram @ gram) @ x

    return {
        "stacked": seconds(stacked, repeat),
        "loop, float32": seconds(lambda: loop(torch.float32), repeat),
        "loop, bfloat16 (as released)": seconds(lambda: loop(torch.bfloat16), 1),
    }


def row(name: str, make: Callable[[list[nn.Parameter]], Any], slow: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table: seconds a step, bytes of state a number, error of a move."""
    ps = parameters(shapes(args.share))
    optimizer = make(ps)
    begin = time.perf_counter()
    if "torchao" in name:
        optimizer.step()  # compiles
    compiling = time.perf_counter() - begin
    with reference_only() if slow else nullcontext():
        took = seconds(optimizer.step, 1 if slow else args.repeat)
    numbers = sum(p.numel() for p in ps)
    found = {"name": name, "seconds": took, "bytes": state_bytes(optimizer) / numbers, "ns": 1e9 * took / numbers}
    found["error"] = error(make) if "bit" in name and not slow and "torchao" not in name else None
    found["compiling"] = compiling if "torchao" in name else 0.0
    print(found, file=sys.stderr, flush=True)
    return found


def torchao_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """torchao's rows, each from a process of its own; one that does not end in time is left out and named."""
    rows = []
    for name in torchao_makers():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "row.json"
            argv = [sys.executable, __file__, "--only", name, "--share", str(args.share), "--json", str(out)]
            try:
                subprocess.run(argv, timeout=args.patience, check=True, stdout=subprocess.DEVNULL)
                rows.append(json.loads(out.read_text(encoding="utf-8")))
            except subprocess.TimeoutExpired:
                print(f"left out: {name} had not compiled and stepped after {args.patience:.0f} s (--patience)")
            except (subprocess.CalledProcessError, OSError, ValueError) as failure:
                print(f"left out: {name} ({failure})")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=4, help="one in so many layers and rows of the table")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--muon", type=int, default=30, help="one in so many layers for the orthogonalisation")
    parser.add_argument("--without", default="", help="leave out rows whose name begins so, such as torchao")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for each of torchao's processes")
    parser.add_argument("--only", default="", help="one of torchao's rows, written to --json")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    if args.only:
        measure.write_json(args.json, row(args.only, *torchao_makers()[args.only], args))
        return
    times = orthogonalisation(args.muon, args.repeat)
    print(times, file=sys.stderr, flush=True)
    wanted = {n: of for n, of in makers().items() if not (args.without and n.startswith(args.without))}
    rows = [row(name, *of, args) for name, of in wanted.items()]
    rows += torchao_rows(args) if not "torchao".startswith(args.without or "-") else []
    found = {r["name"]: r["seconds"] for r in rows}
    sizes = shapes(args.share)
    lines = [
        [r["name"], f"{r['seconds']:.3f} s", f"{r['ns']:.2f}", f"{r['bytes']:.2f}",
         "" if r["error"] is None else f"{r['error']:.3f}", f"{r['compiling']:.0f} s" if r["compiling"] else ""]
        for r in rows
    ]  # fmt: skip
    print(f"{sum(torch.Size(s).numel() for s in sizes):,} numbers in {len(sizes)} tensors\n{measure.machine()}\n")
    print(measure.table(["one step", "time", "ns a number", "state bytes", "error of a move", "compiling"], lines))
    print(measure.table(["orthogonalisation", "time"], [[n, f"{t:.3f} s"] for n, t in times.items()]))
    claims = [("AdamW, of torch's fused", found["skimp AdamW"] / found["torch AdamW, fused"], "<=", 1.05)]
    peers = [t for n, t in found.items() if n.startswith(("bitsandbytes", "torchao"))]
    if peers:
        for bits in ("8-bit", "4-bit"):
            claims.append((f"{bits}, of the fastest peer", found[f"skimp {bits}"] / min(peers), "<=", 0.25))
            claims.append((f"{bits} reference", found[f"skimp {bits}, reference"] / min(peers), "<=", 1.2))
    claims.append(("Muon, of the released loop", times["stacked"] / times["loop, bfloat16 (as released)"], "<=", 0.5))
    said, good = measure.verdicts(claims)
    print("\n" + "\n".join(said))
    measure.write_json(args.json, {"seconds": found | times, "verdicts": said, "machine": measure.machine()})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
