"""Read what `torch.cuda.memory._dump_snapshot` wrote, without running anything that is in it.

A snapshot is a pickle of plain dictionaries, lists, strings and numbers. A pickle may name any function to be called
while it is read, so everything that names one is refused.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skimp.core.errors import SkimpError
from skimp.core.memory.cuda_settings import INTERVALS, AllocatorSettings

HOW = "torch.cuda.memory._record_memory_history() before the run, torch.cuda.memory._dump_snapshot(FILE) after it"


@dataclass(frozen=True)
class Snapshot:
    """The file's content.

    Attributes:
        segments: what was reserved when it was written, with its blocks.
        traces: what happened before, per device; as much as the history held.
        settings: the allocator's.
    """

    path: Path
    segments: list[dict[str, Any]]
    traces: list[list[dict[str, Any]]]
    settings: AllocatorSettings

    def devices(self) -> list[int]:
        """Those with anything on them."""
        traced = {i for i, trace in enumerate(self.traces) if trace}
        return sorted(traced | {int(s.get("device", 0)) for s in self.segments})


class _Plain(pickle.Unpickler):
    """Takes data and nothing that would be called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot asks for nothing")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside the file")


def read_snapshot(path: Path) -> Snapshot:
    """Read and check a snapshot.

    Raises:
        SkimpError: no such file, no pickle, one that would run code, or another thing than a snapshot.
    """
    try:
        with path.open("rb") as file:
            found = _Plain(file).load()
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from None
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise _refusal(path, str(error) or type(error).__name__, "it is not the pickle that torch writes") from None
    if isinstance(found, list):  # torch before 2.0 wrote the segments alone
        found = {"segments": found, "device_traces": []}
    content: dict[str, Any] = found if isinstance(found, dict) else {}
    segments, traces = content.get("segments"), content.get("device_traces")
    said = content.get("allocator_settings") or {}
    whole = isinstance(segments, list) and isinstance(traces, list) and isinstance(said, dict)
    if not whole or not all(map(_is_segment, segments or ())) or not all(map(_is_trace, traces or ())):
        kind = f"a {type(found).__name__}" + (f" with {', '.join(map(str, list(content)[:4]))}" if content else "")
        raise _refusal(path, kind, "a snapshot has segments with addresses, sizes and blocks, and device_traces")
    try:
        settings = _settings(said)
    except (AttributeError, TypeError, ValueError) as error:
        raise _refusal(path, f"allocator_settings: {error}", "they are not as torch writes them") from None
    return Snapshot(path, segments or [], traces or [], settings)


def looks_like_one(path: Path) -> bool:
    """Whether `skimp doctor PATH` means a snapshot: a file that is there, or a name as torch's notes give it."""
    return path.is_file() or (path.suffix in (".pickle", ".pkl") and not path.is_dir())


def _refusal(path: Path, found: str, why: str = "") -> SkimpError:
    return SkimpError(f"a CUDA memory snapshot at {path}", found, why, [HOW, "skimp doctor RUN: a run's folder"])


def _is_segment(segment: Any) -> bool:
    if not _counted(segment, "address", "total_size", maybe=("device",)) or not isinstance(segment.get("blocks"), list):
        return False
    maybe = ("address", "requested_size", "stream")
    return all(_counted(block, "size", maybe=maybe) and _framed(block) for block in segment["blocks"])


def _is_trace(trace: Any) -> bool:
    return isinstance(trace, list) and all(map(_is_event, trace))


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("action"), str):
        return False
    sized = ("addr", "size") if event["action"] in ("alloc", "free_requested") else ()
    return _counted(event, *sized, maybe=("addr", "size", "stream", "device_free")) and _framed(event)


def _counted(value: Any, *names: str, maybe: tuple[str, ...] = ()) -> bool:
    """Whether it is a dictionary with whole numbers, none below 0, at `names`, and at `maybe` where it has those."""
    if not isinstance(value, dict):
        return False
    wanted = [*names, *(name for name in maybe if name in value)]
    return all(isinstance(value.get(name), int) and value[name] >= 0 for name in wanted)


def _framed(value: dict[str, Any]) -> bool:
    """Whether its frames, if any, are a list."""
    return isinstance(value.get("frames") or [], (list, tuple))


def _settings(said: dict[str, Any]) -> AllocatorSettings:
    """From the snapshot's own words; what it does not say is torch's default."""
    limit = said.get("max_split_size")
    divisions = [0] * INTERVALS
    for size, value in (said.get("roundup_power2_divisions") or {}).items():
        divisions[min(max(int(size).bit_length() - 1, 0), INTERVALS - 1)] = int(value)
    return AllocatorSettings(
        expandable=bool(said.get("expandable_segments", False)),
        # Unlimited is written as -1 or as the largest number of bytes there is.
        max_split=limit if isinstance(limit, int) and 0 < limit < 2**60 else None,
        gc_threshold=float(said.get("garbage_collection_threshold") or 0.0),
        divisions=tuple(divisions),
    )
