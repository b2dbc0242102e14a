"""`python -m skimp.run.doctor.check FOLDER`: is this installation right? Prints one line of JSON.

Each check holds a part on which every run rests against an independent second opinion: the native kernels against
their references, the memory tracker against the c10 allocator, the malloc policy against the system's own figure, the
disk against what a checkpoint asks of it.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.forms import reference_only
from skimp.core.memory.oracle import witness
from skimp.core.memory.process import resident, set_malloc_policy, trim
from skimp.core.memory.tracker import Tracker
from skimp.core.read import read
from skimp.core.units import format_bytes
from skimp.kernels.native import load, why

#: Of float32 sums in another order, relative to the largest value.
CLOSE = 2e-6


#: Passed, None where it does not apply; and what was compared, with figures.
Answer = tuple[bool | None, str]


@dataclass(frozen=True)
class Check:
    """name; passed: None where it does not apply; said: what was compared, with figures."""

    name: str
    passed: bool | None
    said: str


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    from skimp.core.noise import normal

    return normal(seed, "doctor", 0, math.prod(shape)).view(shape)


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit."""
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    a, b = (t.contiguous().view(kinds[t.element_size()]) for t in (one, other))
    return not read((a != b).any(), expect=False)


def _far(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest value, the second opinion in float64."""
    return float(read((found.double() - wanted).abs().max() / wanted.abs().max(), expect=0.0))


def _bits(make: Callable[[], list[Tensor]]) -> Answer:
    """The native form and the reference of an operator, bit by bit."""
    if why():
        return (None, f"the reference runs: {why().partition(':')[0]}")
    found = make()
    with reference_only():
        wanted = make()
    wrong = sum(not _same(a, b) for a, b in zip(found, wanted, strict=True))
    count = sum(t.numel() for t in found)
    return (wrong == 0, f"{count:,} numbers {'equal to the bit' if not wrong else 'differ'}")


def philox() -> Answer:
    from skimp.core.noise import random_uint32

    return _bits(lambda: [random_uint32(5, "doctor", 3, 10_007)])


def rounding() -> Answer:
    from skimp.core.codecs import stochastic_round

    return _bits(lambda: [stochastic_round(_numbers(97, 61), 5, "w")])


def codec() -> Answer:
    from skimp.core.codecs import Dynamic8

    return _bits(lambda: list(Dynamic8().encode(_numbers(41, 301)).values()))


def update() -> Answer:
    from skimp.optim import AdamW8bit

    def make() -> list[Tensor]:
        p = nn.Parameter(_numbers(129, 65))
        rule = AdamW8bit([("w", p)], lr=1e-2)
        for seed in range(3):
            rule.step_parameter(p, _numbers(129, 65, seed=seed + 1))
        return [p.detach()]

    return _bits(make)


def layers() -> Answer:
    """Fused RMSNorm and SwiGLU with their gradients, against the plain forms in float64."""
    if why():
        return (None, f"the plain layers run: {why().partition(':')[0]}")
    from skimp.kernels.fused import rms_norm, rms_norm_reference, swiglu, swiglu_reference

    def both(norm: Any, gate: Any, wide: bool) -> list[Tensor]:
        x, w = _numbers(33, 123), _numbers(123, seed=1).abs() + 0.5
        x, w = (t.double() if wide else t for t in (x, w))
        x.requires_grad_(), w.requires_grad_()
        y = gate(norm(x, w, 1e-5), x)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(t.grad for t in (x, w) if t.grad is not None)]

    pairs = zip(both(rms_norm, swiglu, False), both(rms_norm_reference, swiglu_reference, True), strict=True)
    far = max(_far(a, b) for a, b in pairs)
    return (far < CLOSE, f"values and gradients within {far:.1e} of float64 (at most {CLOSE:.0e})")


def tracker() -> Answer:
    """A whole step of a small network: skimp's count against the allocator's own events."""
    net = nn.Sequential(nn.Linear(96, 200), nn.GELU(), nn.Linear(200, 200), nn.LayerNorm(200), nn.Linear(200, 7))
    x = _numbers(50, 96)

    def step() -> None:
        net(x).square().mean().backward()

    step()  # the first call of a library function may keep workspace for good
    net.zero_grad()
    _, seen = witness(step)
    net.zero_grad()
    with Tracker() as ours:
        ours.hold([*net.parameters(), x], "weights")
        rest = ours.live
        step()
    counted = ours.peak.total - rest
    said = f"counted {counted:,} bytes at the peak of a step, the allocator {seen.peak:,}"
    return (counted == seen.peak, said)


def malloc() -> Answer:
    """Freed tensors go back to the system: what plans of resident memory rest on."""
    if not set_malloc_policy("return"):
        return (None, "not glibc: there is no policy to set, and plans know it")
    size = 64 << 20
    before = resident().now
    held = [torch.ones(size // 64 // 4) for _ in range(64)]
    grown = resident().now - before
    del held
    trim()
    kept = resident().now - before
    said = f"of {format_bytes(grown)} taken, {format_bytes(max(kept, 0))} stayed after they were freed"
    return (grown > 0.9 * size and kept < size // 8, said)


def disk(folder: Path) -> Answer:
    """Write aside, flush, rename, lock: all that a checkpoint asks of a file system."""
    from skimp.core.errors import SkimpError
    from skimp.run.durable import write_file
    from skimp.run.folder import claim

    here = folder.absolute()
    while not here.exists():
        here = here.parent
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".skimp-doctor-", dir=here) as made,
            claim(Path(made), {}, False) as run,
        ):
            write_file(run.path / "file", bytes(1 << 20))
            size = (run.path / "file").stat().st_size
    except (OSError, SkimpError) as error:
        return (False, f"{here}: {error}")
    return (size == 1 << 20, f"{here}: written, flushed, renamed and locked")


CHECKS: dict[str, Callable[[], Answer]] = {
    "random numbers": philox,
    "bf16 rounding": rounding,
    "8-bit codec": codec,
    "8-bit AdamW": update,
    "fused layers": layers,
    "memory tracker": tracker,
    "malloc policy": malloc,
}


def checks(folder: Path) -> list[Check]:
    """All of them; one that raises has failed, with its exception for an answer."""
    load()
    found = []
    every: dict[str, Callable[[], Answer]] = {**CHECKS, "disk": partial(disk, folder)}
    for name, check in every.items():
        try:
            passed, said = check()
        except Exception as error:
            passed, said = False, f"{type(error).__name__}: {error}"
        found.append(Check(name, passed, said))
    return found


if __name__ == "__main__":
    print(json.dumps({"checks": [vars(check) for check in checks(Path(sys.argv[1]))]}))
