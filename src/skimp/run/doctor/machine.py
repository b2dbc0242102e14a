"""The machine under a run: processor, memory and who limits it, allocator, disk, cache."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from skimp.core.errors import SkimpError
from skimp.core.memory.room import field
from skimp.core.units import format_bytes
from skimp.recipe.host import host_budget
from skimp.run.doctor.finding import Finding

#: skimp lets every tensor above its threshold be a mapping of its own, up to 60,000 of them.
MAPPINGS_WANTED = 65_530
#: Allocators that may be loaded before the C library's and then do not listen to `mallopt`.
OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc", "hoard")
SMALL = 2_000_000_000


def machine(root: Path = Path("/")) -> Iterator[Finding]:
    """What the system says of itself.

    Args:
        root: where proc and sys are mounted; another folder in tests.
    """
    libc = " ".join(platform.libc_ver()) or "unknown C library"
    yield Finding("machine", "system", f"{platform.system()} {platform.release()}, {libc}, {platform.machine()}")
    yield Finding("machine", "python", f"{platform.python_version()} at {sys.executable}")
    yield _processor(root)
    yield _memory(root)
    yield from _swap(root)
    yield from _limits()
    yield _malloc(root)
    yield from _mappings(root)


def files(output: Path) -> Iterator[Finding]:
    """Where a run writes: its output and the cache of tokens."""
    yield _disk("output", output)
    from skimp.data.fingerprint import cache_folder

    cache = cache_folder()
    found = _disk("cache", cache)
    held = _size(cache)
    about = f"{found.value}; it holds {format_bytes(held)} of prepared text"
    set_by = "SKIMP_CACHE" if os.environ.get("SKIMP_CACHE") else "the default; SKIMP_CACHE names another"
    mend = "export SKIMP_CACHE=/a/folder/that/can/be/written" if found.state == "wrong" else found.mend
    yield Finding("files", "cache", f"{about} ({set_by})", found.state, mend, found.facts | {"held_bytes": held})


def plans(probe: dict[str, Any]) -> Iterator[Finding]:
    """How far off plans on this machine were so far, by the log of planned against measured."""
    from skimp.plan.history import path, read

    log = path()
    count, seen = len(read(log)), probe.get("plans", {})
    said = (
        "; ".join(seen.get("said", ())) or "no run on this machine counts yet (300 MB above its process, this version)"
    )
    facts = {"path": str(log), "records": count, **{k: v for k, v in seen.items() if k != "said"}}
    where = f" ({count} records in {log})" if count else ""
    if log.exists() and not os.access(log, os.R_OK | os.W_OK):
        yield Finding("files", "plans", f"{log} cannot be read and written", "note", f"chmod u+rw {log}", facts)
    else:
        yield Finding("files", "plans", f"{said}{where}", facts=facts)


def _processor(root: Path) -> Finding:
    name, flags = platform.processor() or platform.machine(), set[str]()
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    wide = [w for w in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve") if w in flags]
    count, mine, quota = os.cpu_count() or 1, len(_affinity()), _quota(root)
    cores = f"{mine} of {count} cores" if mine != count else f"{count} cores"
    if quota is not None and quota < mine:
        cores += f", of which the control group grants {quota:g}"
    asked = os.environ.get("OMP_NUM_THREADS")
    cores += f"; OMP_NUM_THREADS={asked}" if asked else ""
    facts = {"model": name, "cores": count, "usable_cores": mine, "quota": quota, "vectors": wide}
    value = f"{name}, {cores}, {', '.join(wide) or 'no vector units known here'}"
    if quota is not None and quota < mine and not asked:
        return Finding("machine", "processor", value, "note", f"export OMP_NUM_THREADS={max(1, int(quota))}", facts)
    return Finding("machine", "processor", value, facts=facts)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota(root: Path) -> float | None:
    """Cores that the control group grants (v2, then v1); None without a limit."""
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return float(quota) / float(period)
    with suppress(OSError, ValueError):
        base = root / "sys/fs/cgroup/cpu"
        given = float((base / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        return given / float((base / "cpu.cfs_period_us").read_text(encoding="ascii")) if given > 0 else None
    return None


def _memory(root: Path) -> Finding:
    try:
        here = host_budget(root)
    except SkimpError as error:
        return Finding("machine", "memory", error.found, "note", error.instead[0])
    total = _meminfo(root, "MemTotal:")
    of = f" of {format_bytes(total)}" if total else ""
    facts = {"room_bytes": here.bytes, "total_bytes": total}
    value = f"{format_bytes(here.bytes)}{of} for a run now: {here.why}"
    if here.bytes < SMALL:
        return Finding("machine", "memory", value, "note", "the quickstart wants 2 GB: end other programs", facts)
    return Finding("machine", "memory", value, facts=facts)


def _swap(root: Path) -> Iterator[Finding]:
    total, free = _meminfo(root, "SwapTotal:"), _meminfo(root, "SwapFree:")
    if total and free is not None and total - free > 0.1 * total:
        text = f"{format_bytes(total - free)} of {format_bytes(total)} in use: a run that swaps is slow, and not killed"
        yield Finding("machine", "swap", text, "note", "end other programs, or lower `budget`")


def _limits() -> Iterator[Finding]:
    """ulimits that refuse memory which the machine has."""
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    for name, flag in (("RLIMIT_AS", "v"), ("RLIMIT_DATA", "d")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            value = f"{format_bytes(soft)}: allocations beyond it are refused"
            yield Finding("machine", name, value, "note", f"ulimit -{flag} unlimited", {"bytes": soft})


def _malloc(root: Path) -> Finding:
    """Whether skimp can make freed memory go back to the system, on which its plans of resident memory rest."""
    loaded = os.environ.get("LD_PRELOAD", "") + os.environ.get("GLIBC_TUNABLES", "")
    other = next((name for name in OTHER_ALLOCATORS if name in loaded), None)
    if other:
        value = f"{other} is loaded instead of the C library's: skimp's policy has no effect, plans are less exact"
        return Finding("machine", "allocator", value, "note", "unset LD_PRELOAD")
    if platform.libc_ver()[0] != "glibc":
        value = "not glibc: freed memory may stay with the process; plans allow 300 MB for it"
        return Finding("machine", "allocator", value, "note", "nothing to mend: plans know it")
    fixed = [key for key in os.environ if key.startswith("MALLOC_") and key.endswith("_")]
    if fixed or "malloc" in loaded:
        names = ", ".join(fixed) or "GLIBC_TUNABLES"
        value = f"glibc, with {names} set outside: skimp sets its own when a run begins"
        return Finding("machine", "allocator", value)
    return Finding("machine", "allocator", "glibc: skimp sets one arena and its thresholds when a run begins")


def _mappings(root: Path) -> Iterator[Finding]:
    with suppress(OSError, ValueError):
        most = int((root / "proc/sys/vm/max_map_count").read_text(encoding="ascii"))
        if most < MAPPINGS_WANTED:
            value = f"vm.max_map_count is {most:,}: a large run may be refused memory that is there"
            yield Finding("machine", "mappings", value, "note", f"sysctl -w vm.max_map_count={MAPPINGS_WANTED}")


def _meminfo(root: Path, key: str) -> int | None:
    found = field(root / "proc/meminfo", key)
    return None if found is None else found * 1024


def _disk(name: str, folder: Path) -> Finding:
    """Free space, and whether one may write there; a folder that does not exist yet is judged by the one above."""
    here = folder.absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    free = shutil.disk_usage(here).free
    facts = {"path": str(folder), "free_bytes": free}
    value = f"{folder}: {format_bytes(free)} free"
    if not os.access(here, os.W_OK | os.X_OK) or not here.is_dir():
        return Finding("files", name, f"{value}, and it cannot be written", "wrong", f"chmod u+rwx {here}", facts)
    if free < SMALL:
        return Finding("files", name, value, "note", "free space: a checkpoint of the quickstart takes 0.8 GB", facts)
    return Finding("files", name, value, facts=facts)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with suppress(OSError):
            total += path.lstat().st_size
    return total
