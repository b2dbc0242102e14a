"""The whole profile of a deep model from simulations of a few of its blocks, where that is provably the same.

`plan.extend` fits a plane through three small simulations for the peak of every moment. Here every category of bytes
at every moment gets its plane, and so do the phases, the resting bytes, the seconds and the counts. A fourth
simulation, of two kept and two recomputed blocks, is the proof: every moment and category of it must lie on the planes.
Where one does not (blocks of several kinds), there is no profile and the caller simulates in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skimp.core.exact import ExactChoices
from skimp.core.memory.tracker import CATEGORIES, Peak
from skimp.plan.extend import CORNERS, Moment, Plane, absent, moments, plane
from skimp.plan.profile import MemoryProfile

#: Kept and recomputed blocks of the simulation that must lie on the planes.
PROOF = (2, 2)


def extended(
    corners: Sequence[MemoryProfile], proof: MemoryProfile, exact: ExactChoices, kept: int, recomputed: int
) -> MemoryProfile | None:
    """The profile of a model with `kept` and `recomputed` blocks.

    Args:
        corners: profiles at `extend.CORNERS`.
        proof: the profile at `PROOF`, of the same lattice row.
        exact: the choices of the whole model.

    Returns:
        The profile, or None when the fourth simulation does not lie on the planes.
    """
    moment_planes = _planes([_values(p, *at) for p, at in zip(corners, CORNERS, strict=True)])
    if moment_planes is None or not _on(moment_planes, _values(proof, *PROOF)):
        return None
    number_planes = _planes([_numbers(p) for p in corners])
    if number_planes is None or not _on(number_planes, _numbers(proof)):
        return None
    found = {m: _at(p, kept, recomputed) for m, p in moment_planes.items() if not absent(m, kept, recomputed)}
    fullest = max(found, key=lambda m: sum(found[m]))
    first = corners[0]
    operators = moments(
        {place: (sum(shares), first.operators.get(place, "")) for place, shares in first.shares.items()},
        *CORNERS[0],
        size=lambda value: value[0],
    )
    numbers = {name: _at(p, kept, recomputed)[0] for name, p in number_planes.items()}
    total = sum(found[fullest])
    seconds = plane([p.seconds for p in corners]).at(kept, recomputed)
    names = {m: (m[0], _address(m[1], kept, recomputed)) for m in found}
    peak = Peak(
        total,
        dict(zip(CATEGORIES, found[fullest], strict=True)),
        *names[fullest],
        operators[fullest][1],
    )
    return MemoryProfile(
        exact,
        peak,
        {k[8:]: v for k, v in numbers.items() if k.startswith("resting ")},
        {**{k[6:]: v for k, v in numbers.items() if k.startswith("phase ")}, "train": total},
        {names[m]: sum(shares) for m, shares in found.items()},
        seconds,
        numbers["flops"],
        numbers["parameters"],
        numbers["trained"],
        numbers["kept"],
        away={k[5:]: v for k, v in numbers.items() if k.startswith("away ")},
        fresh=numbers["fresh"],
        measured=first.measured,
    )


def _values(profile: MemoryProfile, kept: int, recomputed: int) -> dict[Moment, tuple[int, ...]]:
    """Bytes by category at every moment."""
    return moments(profile.shares, kept, recomputed, size=sum)


def _numbers(profile: MemoryProfile) -> dict[Any, tuple[int, ...]]:
    found = {
        "flops": profile.flops,
        "parameters": profile.parameters,
        "trained": profile.trained,
        "kept": profile.kept_bytes,
        "fresh": profile.fresh,
    }
    found |= {f"resting {k}": v for k, v in profile.resting.items()}
    found |= {f"away {k}": v for k, v in profile.away.items()}
    found |= {f"phase {k}": v for k, v in profile.phases.items() if k != "train"}
    return {k: (v,) for k, v in found.items()}


def _planes(values: Sequence[Mapping[Any, tuple[int, ...]]]) -> dict[Any, tuple[Plane, ...]] | None:
    if any(v.keys() != values[0].keys() for v in values):
        return None
    return {key: tuple(plane(list(row)) for row in zip(*(v[key] for v in values), strict=True)) for key in values[0]}


def _at(planes: tuple[Plane, ...], kept: int, recomputed: int) -> tuple[int, ...]:
    return tuple(round(p.at(kept, recomputed)) for p in planes)


def _on(planes: Mapping[Any, tuple[Plane, ...]], values: Mapping[Any, tuple[int, ...]]) -> bool:
    return planes.keys() == values.keys() and all(_at(planes[k], *PROOF) == values[k] for k in values)


def _address(owner: str, kept: int, recomputed: int) -> str:
    """'kept last' of 20 recomputed and 12 kept blocks is block 31; what is outside the blocks keeps its name."""
    first = {"recomputed": 0, "kept": recomputed}
    count = {"recomputed": recomputed, "kept": kept}
    kind, _, rank = owner.partition(" ")
    if kind not in first or rank not in ("first", "last"):
        return owner
    return f"block {first[kind] + (count[kind] - 1 if rank == 'last' else 0)}"
