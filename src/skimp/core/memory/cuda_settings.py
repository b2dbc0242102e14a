"""Constants and settings of PyTorch's CUDA caching allocator, and the sizes that follow from them.

Facts from PyTorch's public sources and notes (c10/core/AllocatorConfig.h, "Memory management" in the CUDA semantics
notes; read at torch 2.10 to 2.13). Requests round up to 512 bytes; up to 1 MiB they come from 2 MiB segments, below
10 MiB from 20 MiB ones, above from a segment of their own in multiples of 2 MiB.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from skimp.core.errors import SkimpError

MIB = 1 << 20
#: Every block is a multiple of this.
UNIT = 512
#: Largest request of the small pool, and the size of its segments.
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
#: Requests from here on get a segment of their own; smaller ones share one of `large_segment`.
OWN_SEGMENT = 10 * MIB
#: Segments of their own are a multiple of this.
SEGMENT_UNIT = 2 * MIB
#: What has to remain of a large block, more than this, to be split off.
LARGE_REST = MIB
#: `roundup_power2_divisions` may differ by power of two: below 1 MiB, then one entry a power up to 32 GiB.
INTERVALS, FIRST_INTERVAL = 16, 20
#: The environment's names for the settings, first wins.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class AllocatorSettings:
    """What `PYTORCH_CUDA_ALLOC_CONF` sets of the size rules; the defaults are torch's.

    Attributes:
        expandable: segments that grow page by page instead of many fixed ones.
        max_split: bytes; blocks of this size or more are never split, and not used for requests below it; None splits
            all.
        non_split_rounding: bytes by which such a block may exceed the request it serves.
        gc_threshold: share of the allowed memory above which old cached segments are freed first; 0 never.
        divisions: of a power of two that requests round up to, by power from 1 MiB on; 0 or 1 rounds to 512 bytes.
        large_segment: bytes of the segment that requests between 1 and 10 MiB share, and of a page of a large
            expandable segment.
    """

    expandable: bool = False
    max_split: int | None = None
    non_split_rounding: int = 20 * MIB
    gc_threshold: float = 0.0
    divisions: tuple[int, ...] = (0,) * INTERVALS
    large_segment: int = 20 * MIB

    def rounded(self, size: int) -> int:
        """Bytes of the block that a request of `size` bytes needs."""
        if size < UNIT:
            return UNIT
        power = size.bit_length() - 1
        divisions = self.divisions[min(max(power - FIRST_INTERVAL, 0), INTERVALS - 1)]
        if divisions > 1 and size > UNIT * divisions:
            return _next_division(size, divisions)
        return -(-size // UNIT) * UNIT

    def segment(self, rounded: int) -> int:
        """Bytes asked of the driver for a block of `rounded` bytes that no cached one can serve."""
        if rounded <= SMALL:
            return SMALL_SEGMENT
        if rounded < OWN_SEGMENT:
            return self.large_segment
        return -(-rounded // SEGMENT_UNIT) * SEGMENT_UNIT

    def describe(self) -> str:
        """What differs from torch's defaults, in the words of the variable; "torch's defaults" for nothing."""
        words = []
        if self.expandable:
            words.append("expandable_segments:True")
        if self.max_split is not None:
            words.append(f"max_split_size_mb:{self.max_split // MIB}")
        if self.non_split_rounding != 20 * MIB:
            words.append(f"max_non_split_rounding_mb:{self.non_split_rounding // MIB}")
        if self.gc_threshold:
            words.append(f"garbage_collection_threshold:{self.gc_threshold:g}")
        if any(d > 1 for d in self.divisions):
            each = ",".join(f"{1 << power}:{max(1, d)}" for power, d in enumerate(self.divisions))
            same = len(set(self.divisions)) == 1
            words.append(f"roundup_power2_divisions:{self.divisions[0] if same else f'[{each}]'}")
        if self.large_segment != 20 * MIB:
            words.append(f"large_segment_size_mb:{self.large_segment // MIB}")
        return ",".join(words) or "torch's defaults"


DEFAULTS = AllocatorSettings()


def _next_division(size: int, divisions: int) -> int:
    """The next multiple of a `divisions`-th of the power of two below `size`."""
    power = 1 << (size.bit_length() - 1)
    if power == size:
        return size
    step = power >> (divisions.bit_length() - 1)
    return 2 * power if step == 0 else -(-size // step) * step


def read_settings(text: str) -> AllocatorSettings:
    """Settings from the variable's form, "max_split_size_mb:128,expandable_segments:True".

    Keys that do not change sizes (back end, pinned memory, …) are passed over, as torch passes them on.

    Raises:
        SkimpError: a value that torch would refuse.
    """
    found: dict[str, object] = {}
    for key, value in re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\s]+)", text):
        try:
            if key == "expandable_segments":
                found["expandable"] = {"true": True, "false": False}[value.lower()]
            elif key == "max_split_size_mb":
                found["max_split"] = _megabytes(value, above=20)
            elif key == "max_non_split_rounding_mb":
                found["non_split_rounding"] = _megabytes(value, above=20)
            elif key == "garbage_collection_threshold":
                found["gc_threshold"] = _share(value)
            elif key == "roundup_power2_divisions":
                found["divisions"] = _divisions(value)
            elif key == "large_segment_size_mb":
                found["large_segment"] = _megabytes(value)
        except (ValueError, KeyError) as error:
            raise SkimpError(
                f"allocator setting {key}:{value}",
                "a value torch does not take",
                str(error),
                ["max_split_size_mb:128", "expandable_segments:True", "garbage_collection_threshold:0.8"],
            ) from None
    return AllocatorSettings(**found)  # type: ignore[arg-type]


def settings_here(environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
    """The settings that a process started from here would have."""
    return read_settings(next((environment[name] for name in VARIABLES if environment.get(name)), ""))


def _megabytes(text: str, above: int = 0) -> int:
    if int(text) <= above:
        raise ValueError(f"more than {above} MiB is wanted")
    return int(text) * MIB


def _share(text: str) -> float:
    if not 0 < float(text) < 1:
        raise ValueError("a share between 0 and 1 is wanted")
    return float(text)


def _divisions(text: str) -> tuple[int, ...]:
    """One number for all sizes, or "[256:1,512:2,>:8]" in MiB: each holds from the entry before up to its size."""
    if not text.startswith("["):
        return (_power(text),) * INTERVALS
    found = [0] * INTERVALS
    first = 0
    for part in text.strip("[]").split(","):
        size, _, value = part.partition(":")
        last = INTERVALS if size.strip() == ">" else min(int(size).bit_length(), INTERVALS)
        found[first:last] = [_power(value)] * (last - first)
        first = max(first, last)
    return tuple(found)


def _power(text: str) -> int:
    value = int(text)
    if value < 1 or value & (value - 1):
        raise ValueError("a power of two is wanted")
    return value
