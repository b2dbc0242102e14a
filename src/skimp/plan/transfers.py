"""Seconds that what waits elsewhere spends on its way: bytes over a bandwidth, less what passes unseen.

On a CPU the bandwidth of the disk is measured, through the very tier a run would use (its checksums included), and
nothing is hidden: the cores that copy are those that compute. The file system's cache is what is measured; a run whose
offloaded bytes are more than the free memory goes at the disk's own pace. For a card the links are assumed, and copies
pass beside the computation: forward hides what goes out, backward what comes back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from skimp.core.disk import DiskTier
from skimp.core.errors import SkimpError
from skimp.core.exact import Place

#: What the probe moves, twice each way.
PROBE = 16 << 20
#: A card's link to its host, PCIe 4.0 with 16 lanes as copies from pinned memory reach it, and an NVMe disk behind it.
CARD_HOST, CARD_DISK = 20e9, 2e9
#: The CPU's own update beside a card, bytes of states, gradient and weight a second.
HOST_UPDATE = 20e9
#: A disk that cannot be tried: a folder that cannot be written yet.
UNKNOWN_DISK = 200e6
#: Below this a disk is called slow: a hard disk reaches 100 to 200 MB/s, a solid one several times as much.
SLOW_DISK = 300e6
#: Share of a step's computation that is forward.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Way:
    """Bytes a second out and back, whether the computation goes on meanwhile, and where the figures are from."""

    out: float
    back: float
    beside: bool
    source: str


def way(place: Place, near: str) -> Way:
    """How bytes get to a place.

    Args:
        place: "host" or "disk".
        near: on a CPU a folder that exists, on the disk in question; empty for a card.
    """
    if near:
        return _measured(near)
    speed, what = (CARD_HOST, "a PCIe 4.0 link") if place == "host" else (CARD_DISK, "an NVMe disk")
    return Way(speed, speed, True, f"assumed: {speed / 1e9:g} GB/s, {what}")


@cache
def _measured(folder: str) -> Way:
    unknown = Way(UNKNOWN_DISK, UNKNOWN_DISK, False, f"assumed: {UNKNOWN_DISK / 1e6:g} MB/s, {folder} cannot be tried")
    try:
        tier = DiskTier(Path(folder))
    except (OSError, SkimpError):
        return unknown
    storage = torch.ones(PROBE, dtype=torch.uint8).untyped_storage()
    try:
        extent = tier.reserve(PROBE)
        tier.store(extent, storage, 0).wait()  # the first time takes the file's pages as well
        out = min(_seconds(lambda: tier.store(extent, storage, 0).wait()) for _ in range(2))
        back = min(_seconds(lambda: tier.fetch(extent, storage).wait()) for _ in range(2))
    except OSError:  # no room for the trial: whether there is enough for a run, its plan says
        return unknown
    finally:
        tier.close()
    return measured_way(folder, PROBE / out, PROBE / back)


def measured_way(folder: str, out: float, back: float) -> Way:
    """A disk at so many bytes a second out and back, in words that say when that is slow."""
    rates = f"measured in {folder}: {out / 1e6:,.0f} MB/s out, {back / 1e6:,.0f} MB/s back"
    slow = ", a slow disk: the predicted seconds are mostly its" if min(out, back) < SLOW_DISK else ""
    return Way(out, back, False, rates + slow)


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


def seconds(activations: Mapping[Place, tuple[int, int]], near: str, compute: float) -> float:
    """What the activations of a step add to its `compute` seconds.

    Args:
        activations: bytes (out, back) by place.
    """
    spent = 0.0
    for place, (out, back) in activations.items():
        road = way(place, near)
        there, here = out / road.out, back / road.back
        if road.beside:
            there = max(0.0, there - FORWARD * compute)
            here = max(0.0, here - (1 - FORWARD) * compute)
        spent += there + here
    return spent


def update_seconds(place: str, states: int, parameters: int, near: str) -> float:
    """What states elsewhere add to a step: their way in and out of memory; or, with the host's own update, the
    gradients' way out, the update and the parameters' way back.

    Args:
        place: "device", "host" or "disk".
        states, parameters: bytes.
    """
    if place == "disk":
        road = way("disk", near)
        return states / road.out + states / road.back
    if place == "host":
        road = way("host", near)
        return parameters / road.out + (2 * states + 3 * parameters) / HOST_UPDATE + parameters / road.back
    return 0.0
