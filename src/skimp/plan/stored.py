"""Simulated profiles kept on disk by content: the same run on the same card, planned again, is read and not simulated.

The key is everything a profile depends on: the recipe without what only says where things go, the exact choices, the
model's config, the device's rates, the number of threads, versions, and skimp's own source, so that a change
while developing is seen. What is found there is checked against its own sum; anything torn or foreign is ignored and
written anew. Not kept are plans for this machine's CPU, whose rates are measured afresh each time, and runs that depend
on a disk or on another folder's content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import skimp
from skimp.core.exact import ExactChoices
from skimp.core.memory.tracker import Peak
from skimp.data.fingerprint import cache_folder, digest_of
from skimp.kernels.native import library
from skimp.plan.cost import Rates
from skimp.plan.profile import MemoryProfile
from skimp.plan.simulate import simulate

SCHEMA = 1
#: Bytes of all profiles; one takes 5 to 200 kB. Beyond it the oldest go, down to three quarters.
MOST = 32_000_000
#: Recipe keys without any bearing on a simulated step.
IRRELEVANT = frozenset({"output", "budget", "checkpoint", "log", "report", "survive", "sample", "device", "auto"})
#: Of `data` only these have one.
SHAPE = ("seq_len", "packing")
#: "0" switches it off for a process and its children.
SWITCH = "SKIMP_PLAN_CACHE"
_off: ContextVar[bool] = ContextVar("skimp_plans_not_stored", default=False)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (MemoryProfile, ExactChoices, Peak)}


def simulated(recipe: Any, exact: ExactChoices, config: dict[str, Any], *, rates: Rates, **options: Any) -> Any:
    """`simulate` with these arguments, or what it gave before."""
    if not _may_be_kept(recipe, exact, options):
        return simulate(recipe, exact, config, rates=rates, **options)
    where = folder() / f"{key(recipe, exact, config, rates, options)}.json"
    known = read(where)
    if known is None:
        known = simulate(recipe, exact, config, rates=rates, **options)
        write(where, known)
    return known


@contextlib.contextmanager
def unstored() -> Iterator[None]:
    """Inside, nothing is read from the folder and nothing written (`--no-cache`)."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def folder() -> Path:
    """Where profiles are: `plans` in the cache folder."""
    return cache_folder() / "plans"


def key(recipe: Any, exact: ExactChoices, config: dict[str, Any], rates: Rates, options: Mapping[str, Any]) -> str:
    """Of everything that a profile depends on."""
    values = {k: v for k, v in recipe.as_dict().items() if k not in IRRELEVANT}
    values["data"] = {name: getattr(recipe.data, name) for name in SHAPE}
    values["eval"] = recipe.eval is not None
    return digest_of({
        "recipe": values, "exact": exact.as_dict(), "config": config, "rates": asdict(rates), "options": dict(options),
        "threads": torch.get_num_threads(), "native": library.available(), "made by": _made_by(),
    })  # fmt: skip


def _may_be_kept(recipe: Any, exact: ExactChoices, options: Mapping[str, Any]) -> bool:
    away = bool(exact.offload) or exact.states != "device"  # its seconds are of a disk measured now
    elsewhere = recipe.adapter is not None and recipe.adapter.source is not None
    watched = options.get("timeline") or options.get("trace") is not None
    switched_off = _off.get() or os.environ.get(SWITCH) == "0"
    return not (switched_off or away or elsewhere or watched or options.get("target", "cpu") == "cpu")


@cache
def _made_by() -> dict[str, str]:
    """Versions, and the sum of all of skimp's files that are no cache of Python's."""
    root = Path(skimp.__file__).parent
    source = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c", ".cpp", ".json", ".so")):
        source.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        source.update(path.read_bytes())
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"skimp": source.hexdigest(), "python": platform.python_version(), **versions}


# ---------------------------------------------------------------------------------------------------------- files
def read(where: Path) -> MemoryProfile | None:
    """The profile in a file; None where there is none, or none that is whole."""
    try:
        found = json.loads(where.read_bytes())
        if found["schema"] != SCHEMA or found["sum"] != digest_of(found["profile"]):
            return None
        profile = decoded(found["profile"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    with contextlib.suppress(OSError):  # read-only folders are read all the same
        os.utime(where)  # the oldest go first: this one is in use
    return profile if isinstance(profile, MemoryProfile) else None


def write(where: Path, profile: MemoryProfile) -> None:
    """Keep a profile: written aside and renamed. A folder that cannot be written costs the next plan its seconds, no
    more."""
    content = encoded(profile)
    data = json.dumps({"schema": SCHEMA, "sum": digest_of(content), "profile": content}).encode()
    with contextlib.suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        _bound(where.parent, len(data))
        descriptor, aside = tempfile.mkstemp(dir=where.parent, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(aside, where)
        except BaseException:
            os.unlink(aside)
            raise


def _bound(where: Path, more: int) -> None:
    files = [(status.st_mtime_ns, status.st_size, path) for path in where.iterdir() if (status := path.stat())]
    held = sum(size for _, size, _ in files) + more
    if held <= MOST:
        return
    for _, size, path in sorted(files):
        if held <= MOST * 3 // 4:
            return
        path.unlink(missing_ok=True)  # another plan may be at the same work
        held -= size


# ----------------------------------------------------------------------------------------------------------- JSON
def encoded(value: Any) -> Any:
    """Plain JSON of a profile's parts; tuples, mappings with any keys and dataclasses are told apart."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {"tuple": [encoded(v) for v in value]}
    if isinstance(value, list):
        return [encoded(v) for v in value]
    if isinstance(value, Mapping):
        return {"mapping": [[encoded(k), encoded(v)] for k, v in value.items()]}
    if is_dataclass(value) and type(value).__name__ in _KINDS:
        return {"kind": type(value).__name__, "of": {f.name: encoded(getattr(value, f.name)) for f in fields(value)}}
    raise TypeError(f"a {type(value).__name__} in a profile: `stored` must learn to write it")


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    if isinstance(value, list):
        return [decoded(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decoded(v) for v in value["tuple"])
    if "mapping" in value:
        return {decoded(k): decoded(v) for k, v in value["mapping"]}
    return _KINDS[value["kind"]](**{name: decoded(v) for name, v in value["of"].items()})
