"""The log of planned against measured on this machine: one JSON line for every run and probe, under the cache folder.

A line is written with one call behind a lock, so that a death leaves at most one torn line, which reading skips and
the next writer closes. The file is bounded: beyond `MOST` bytes the older half goes. Nothing here can fail a run: what
could not be written comes back as a sentence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from skimp.core.memory.room import field, text
from skimp.data.fingerprint import cache_folder
from skimp.run.durable import write_all, write_file

SCHEMA = 1
#: Bytes of the file; a line takes about 900.
MOST = 1_000_000
#: Seconds to wait for another process that is writing.
PATIENCE = 2.0


def path() -> Path:
    """Where the log is: `history/runs.jsonl` in the cache folder."""
    return cache_folder() / "history" / "runs.jsonl"


def machine(root: Path = Path("/")) -> str:
    """A short name of this hardware: processor, usable cores, memory. Containers on one host share it."""
    cpu = platform.processor() or platform.machine()
    for line in (text(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # In GiB: what the kernel keeps for itself differs by some pages from boot to boot.
    memory = round((field(root / "proc/meminfo", "MemTotal:") or 0) / 2**20)
    return hashlib.sha256(f"{cpu}|{cores}|{memory}|{platform.system()}".encode()).hexdigest()[:12]


def record(
    recipe: Any, plan: Any, measured: Mapping[str, Any], versions: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """One line.

    Args:
        recipe: as it ran.
        plan: the `Plan` it ran under.
        measured: `tensors`, `process` (bytes), `seconds` (of a step); None where not known; and whatever else.
        versions: of what the figures depend on (`run.environment`).
        kind: "run" or "probe".
    """
    exact = plan.exact
    return {
        "schema": SCHEMA,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kind": kind,
        "machine": machine(),
        "versions": {k: versions.get(k) for k in ("skimp", "torch", "transformers", "python", "threads")},
        "recipe": digest(recipe),
        "model": plan.model,
        "shape": {
            "parameters": plan.profile.parameters,
            "trained": plan.profile.trained,
            "blocks": plan.blocks,
            "rows": plan.rows,
            "seq": recipe.data.seq_len,
            "precision": recipe.precision,
            "optimizer": recipe.optimizer.name,
            "adapter": recipe.adapter.name if recipe.adapter is not None else None,
            **{**exact.as_dict(), "recompute": len(exact.recompute)},
        },
        "planned": {
            "tensors": plan.profile.phases["train"],
            "highest": plan.profile.peak_bytes,
            "process": plan.peak_bytes,
            "baseline": plan.places.baseline,
            "seconds": plan.seconds,
        },
        "measured": dict(measured),
    }


def digest(recipe: Any) -> str:
    """Of everything in a recipe that bytes and seconds of a step depend on; steps, names and places of files do not."""
    values = recipe.as_dict()
    kept = {k: values.get(k) for k in ("model", "precision", "device", "optimizer", "adapter", "exact")}
    kept["shape"] = [recipe.data.seq_len, recipe.train.batch_tokens, recipe.data.packing]
    kept["loss"] = [recipe.train.clip, values["train"].get("loss")]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def append(line: Mapping[str, Any], where: Path | None = None) -> str | None:
    """Add one record.

    Returns:
        None, or the sentence that says why it was not written.
    """
    where = where or path()
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with _locked(where):
            _bound(where)
            _write(where, (json.dumps(line, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        why = error.strerror or str(error)
        return (
            f"planned against measured is not remembered: {where}: {why}; plans on this machine learn nothing from it"
        )
    return None


def _write(where: Path, data: bytes) -> None:
    descriptor = os.open(where, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        write_all(descriptor, b"\n" * torn + data)
    finally:
        os.close(descriptor)


def _bound(where: Path) -> None:
    """Keep the newer half of a file that has grown too long, replaced as a whole."""
    if where.exists() and where.stat().st_size > MOST:
        lines = where.read_bytes().splitlines(keepends=True)
        write_file(where, b"".join(lines[len(lines) // 2 :]))


@contextlib.contextmanager
def _locked(where: Path) -> Iterator[None]:
    """One writer at a time; a system without file locks relies on appending being one call."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(where.with_name(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(f"another process has held its lock for {PATIENCE:g} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def read(where: Path | None = None) -> list[dict[str, Any]]:
    """All records, oldest first. Torn lines and those of another schema are passed over; no file: none."""
    where = where or path()
    try:
        data = where.read_bytes()
    except OSError:
        return []
    found = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("schema") == SCHEMA and _sound(row):
            found.append(row)
    return found


def _sound(row: Mapping[str, Any]) -> bool:
    """Whether the numbers that are reckoned with are there: a log may have been edited by hand."""
    parts = (row.get("planned"), row.get("measured"), row.get("shape"), row.get("versions"))
    if not all(isinstance(part, dict) for part in parts):
        return False
    planned, measured = row["planned"], row["measured"]
    sizes = [planned.get(k) for k in ("tensors", "highest", "process", "baseline", "seconds")]
    maybe = [measured.get(k) for k in ("tensors", "process", "seconds")]
    return all(_number(v) for v in sizes) and all(v is None or _number(v) for v in maybe)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18


def steady_seconds(metrics: Path, most: int = 1 << 16) -> float | None:
    """The middle seconds of a run's last steps, by the end of its `metrics.jsonl`.

    The first two steps are left out: one warms up, one is watched by the tracker. None where no other is there.
    """
    with metrics.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        whole = file.read().splitlines(keepends=True)[1 if size > most else 0 :]
    rows = [json.loads(line) for line in whole if line.endswith(b"\n")]
    found = [row["seconds"] for row in rows if row["step"] > 2]
    return float(median(found)) if found else None
