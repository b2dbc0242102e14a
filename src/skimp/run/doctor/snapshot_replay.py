"""What a memory snapshot shows: peaks as they were, as the allocator's model has them, and who held the memory.

The history is a ring: blocks that were there before it began are known by their release or by the final state, not by
when they came. They are given to the model first, in the order of their addresses; only a history from the process's
first allocation on can be expected to come out to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from skimp.core.memory.cuda_allocator import CudaAllocator, Level
from skimp.core.memory.cuda_blocks import Block
from skimp.run.doctor.snapshot import Snapshot

#: Live blocks that are named at the peak.
SHOWN = 8
#: Actions that take from the driver, and that give back.
TAKES, GIVES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Held:
    """A live block: bytes asked for, and the lines of code that asked, innermost first."""

    size: int
    frames: tuple[str, ...]


@dataclass
class DeviceReport:
    """One device of a snapshot, in bytes.

    Attributes:
        device: its index; events: length of its history; whole: the history begins with an empty allocator.
        reserved, requested: as recorded; peaks are those within the history. allocated: when it was written.
        modelled: allocated and reserved peaks of the model on the same events.
        ooms: requests that torch itself refused, (bytes, free then).
        fixed, expandable: number and bytes of segments when it was written. cached: largest free blocks then.
        agreed: of the blocks given out, the share that the model put at the very address; 1.0 when it was never wrong.
        peak: the largest live blocks when most was requested.
    """

    device: int
    events: int = 0
    whole: bool = True
    reserved: Level = field(default_factory=Level)
    requested: Level = field(default_factory=Level)
    allocated: int = 0
    modelled_allocated: int = 0
    modelled_reserved: int = 0
    agreed: float = 1.0
    ooms: list[tuple[int, int]] = field(default_factory=list)
    fixed: tuple[int, int] = (0, 0)
    expandable: tuple[int, int] = (0, 0)
    cached: list[int] = field(default_factory=list)
    peak: list[Held] = field(default_factory=list)

    @property
    def fragmentation(self) -> int:
        """Reserved and not allocated, when the snapshot was written."""
        return self.reserved.now - self.allocated

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "device": self.device,
            "events": self.events,
            "from_the_start": self.whole,
            "reserved_bytes": self.reserved.now,
            "allocated_bytes": self.allocated,
            "fragmentation_bytes": self.fragmentation,
            "requested_peak_bytes": self.requested.peak,
            "reserved_peak_bytes": self.reserved.peak,
            "modelled_allocated_peak_bytes": self.modelled_allocated,
            "modelled_reserved_peak_bytes": self.modelled_reserved,
            "same_addresses": self.agreed,
            "ooms": [{"size": size, "free": free} for size, free in self.ooms],
            "segments": {"fixed": list(self.fixed), "expandable": list(self.expandable)},
            "largest_cached_bytes": self.cached,
            "largest_at_the_peak": [{"size": h.size, "frames": list(h.frames)} for h in self.peak],
        }


def report(snapshot: Snapshot) -> list[DeviceReport]:
    """Every device with something on it."""
    return [_device(snapshot, device) for device in snapshot.devices()]


def _device(snapshot: Snapshot, device: int) -> DeviceReport:
    segments = [s for s in snapshot.segments if s.get("device", 0) == device]
    trace = snapshot.traces[device] if device < len(snapshot.traces) else []
    found = DeviceReport(device, len(trace))
    grown = [s for s in segments if s.get("is_expandable")]
    whole = [s for s in segments if not s.get("is_expandable")]
    found.expandable, found.fixed = ((len(ss), sum(s["total_size"] for s in ss)) for ss in (grown, whole))
    blocks = [b for s in segments for b in s["blocks"]]
    found.allocated = sum(b["size"] for b in blocks if b.get("state") == "active_allocated")
    found.cached = sorted((b["size"] for b in blocks if b.get("state") == "inactive"), reverse=True)[:SHOWN]
    now = found.fixed[1] + found.expandable[1]
    found.reserved = Level(now - sum(_taken(e) for e in trace))
    before = _before(segments, trace)
    found.whole = not before and found.reserved.now == 0
    _recorded(found, trace, before)
    _modelled(found, trace, before, snapshot)
    return found


def _taken(event: dict[str, Any]) -> int:
    action = event["action"]
    return int(event.get("size", 0)) * ((action in TAKES) - (action in GIVES))


def _before(segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Blocks in use before the first event, by address: released, or still there, without having been given out."""
    made: set[int] = set()
    found: dict[int, dict[str, Any]] = {}
    for event in trace:
        action, address = event["action"], int(event.get("addr", 0))
        if action == "alloc":
            made.add(address)
        elif action == "free_requested":
            if address not in made:
                found[address] = event
            made.discard(address)
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block.get("state") == "active_allocated" and address not in made and address not in found:
                found[address] = {"addr": address, "size": block.get("requested_size", block["size"]), **_kept(block)}
            address += block["size"]
    return dict(sorted(found.items()))


def _kept(block: dict[str, Any]) -> dict[str, Any]:
    return {key: block[key] for key in ("frames", "stream") if key in block}


def _recorded(found: DeviceReport, trace: list[dict[str, Any]], before: dict[int, dict[str, Any]]) -> None:
    """Reserved and requested bytes along the history, and the blocks at its fullest moment."""
    live = dict(before)
    found.requested.add(sum(int(e["size"]) for e in live.values()))
    found.reserved.add(0)
    fullest = list(live.values())
    stale = False  # the present moment is the fullest one and not yet noted
    for event in trace:
        action, address = event["action"], int(event.get("addr", 0))
        found.reserved.add(_taken(event))
        if action == "alloc":
            live[address] = event
            top = found.requested.peak
            found.requested.add(int(event["size"]))
            stale = stale or found.requested.peak > top
        elif action == "free_requested" and address in live:
            if stale:
                fullest, stale = list(live.values()), False
            found.requested.add(-int(live.pop(address)["size"]))
        elif action == "oom":
            found.ooms.append((int(event.get("size", 0)), int(event.get("device_free", 0))))
    if stale:
        fullest = list(live.values())
    largest = sorted(fullest, key=lambda e: -int(e["size"]))[:SHOWN]
    found.peak = [Held(int(e["size"]), _frames(e.get("frames") or ())) for e in largest]


def _modelled(
    found: DeviceReport, trace: list[dict[str, Any]], before: dict[int, dict[str, Any]], snapshot: Snapshot
) -> None:
    """The same events through the allocator's model, without its own limits: cached segments go when they went."""
    allocator = CudaAllocator(snapshot.settings)
    held: dict[int, Block] = {}
    waiting: dict[int, Block] = {}
    for address, event in before.items():
        held[address] = allocator.malloc(max(1, int(event["size"])), int(event.get("stream", 0)))
    at: int | None = None
    given = agreed = 0
    for event in trace:
        action, address, size = event["action"], int(event.get("addr", 0)), int(event.get("size", 0))
        if action == "segment_alloc":
            at = address
        elif action == "alloc" and size > 0:
            held[address] = allocator.malloc(size, int(event.get("stream", 0)), at)
            at = None
            given, agreed = given + 1, agreed + (held[address].address == address)
        elif action == "free_requested" and address in held:
            block = waiting[address] = held.pop(address)
            allocator.record_stream(block, -1)  # until it is said to be completed
            allocator.free(block)
        elif action == "free_completed" and address in waiting:
            allocator.synchronise(waiting.pop(address))
        elif action in GIVES:
            allocator.release(address)
    found.modelled_allocated, found.modelled_reserved = allocator.allocated.peak, allocator.reserved.peak
    found.agreed = agreed / given if given else 1.0


def _frames(frames: Iterable[Any]) -> tuple[str, ...]:
    """'model.py:12 forward', the user's own lines before torch's."""
    told = [
        (str(f.get("filename", "")), f"{f.get('filename', '?')}:{f.get('line', 0)} {f.get('name', '?')}")
        for f in frames
        if isinstance(f, dict)
    ]
    own = [line for file, line in told if "/torch/" not in file and file.endswith(".py")]
    return tuple((own or [line for _, line in told])[:3])
