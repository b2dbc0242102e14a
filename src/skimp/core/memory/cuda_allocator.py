"""A model of PyTorch's CUDA caching allocator: what a sequence of requests reserves, not only what it asks for.

A request takes the smallest cached block that holds it (of several alike the one at the lowest address), in its pool
(small or large) and stream; the rest is split off if it is worth keeping. Without one the driver is asked for a
segment. A freed block melts into free neighbours and stays reserved. When the driver refuses, cached segments without a
block in use go back and the request is made again. Reserved less allocated is fragmentation.

Rules as in `cuda_settings`. The driver's addresses are not known: new segments lie above old ones, which decides only
between blocks of one size. Time is not modelled: a block used on another stream waits until `synchronise`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from skimp.core.errors import OutOfMemory
from skimp.core.memory.cuda_blocks import Block, Pool, cut, melt
from skimp.core.memory.cuda_expandable import RANGE, expand, unmap
from skimp.core.memory.cuda_settings import DEFAULTS, LARGE_REST, SMALL, SMALL_SEGMENT, UNIT, AllocatorSettings
from skimp.core.units import format_bytes


@dataclass
class Level:
    """Bytes now, and the most there were."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        if self.now > self.peak:
            self.peak = self.now


class CudaAllocator:
    """The allocator of one device in one process.

    Args:
        settings: what the environment sets.
        capacity: bytes the driver can give; None for no end.
        allowed: bytes that `set_per_process_memory_fraction` allows; garbage collection works only with it.

    Attributes:
        requested, allocated, active, reserved: bytes asked for, in blocks given out, in blocks not reusable (waiting
            for another stream included), and taken from the driver.
        retries: requests that needed cached segments to be given back.
        segments: calls to the driver for memory; pages of expandable segments count one a call.
    """

    def __init__(
        self, settings: AllocatorSettings = DEFAULTS, capacity: int | None = None, allowed: int | None = None
    ) -> None:
        self.settings, self.capacity, self.allowed = settings, capacity, allowed
        self.requested, self.allocated, self.active, self.reserved = Level(), Level(), Level(), Level()
        self.retries = self.segments = 0
        self._pools: dict[tuple[bool, int], Pool] = {}
        self._clocks: tuple[list[int], list[int]] = ([0], [0])
        self._waiting: list[Block] = []
        self._next = RANGE

    def malloc(self, size: int, stream: int = 0, at: int | None = None) -> Block:
        """Give out a block for `size` > 0 bytes.

        Args:
            at: address of a new segment, should one be needed, where it is known.

        Raises:
            OutOfMemory: neither cached blocks nor the driver have it.
        """
        rounded = self.settings.rounded(size)
        small = rounded <= SMALL
        pool = self._pools.get((small, stream)) or self._pool(small, stream)
        block = self._search(pool, rounded) or self._grow(pool, rounded, at)
        if block is None:
            raise OutOfMemory(
                f"{format_bytes(size)} on the device",
                f"{format_bytes(self.allocated.now)} allocated, {format_bytes(self.reserved.now)} reserved"
                + (f" of {format_bytes(self.capacity)}" if self.capacity is not None else ""),
                f"no cached block holds it; {format_bytes(self.reserved.now - self.allocated.now)} lie in pieces",
                "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF, or a smaller run",
            )
        if self._splits(block, rounded):
            cut(block, rounded)
        block.free, block.wanted = False, size
        self.requested.add(size)
        self.allocated.add(block.size)
        self.active.add(block.size)
        return block

    def free(self, block: Block) -> None:
        """Take a block back; used on other streams it waits for `synchronise`."""
        self.allocated.now -= block.size
        if block.uses:
            self._waiting.append(block)
        else:
            self._cache(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note the block's use on another stream than its own."""
        if stream != block.pool.stream:
            block.uses.add(stream)

    def synchronise(self, block: Block | None = None) -> None:
        """All streams have come to an end, or those that used `block`: what waited for them is free."""
        done = [b for b in self._waiting if block is None or b is block]
        self._waiting = [b for b in self._waiting if block is not None and b is not block]
        for one in done:
            one.uses.clear()
            self._cache(one)

    def release(self, address: int | None = None) -> None:
        """Give every cached segment without a block in use back to the driver, and every such page.

        Args:
            address: only the segment there, if it is one; all pages of expandable segments.
        """
        if address is None:
            self.synchronise()
        for pool in self._pools.values():
            for _, _, block in list(pool.cached):
                if block.origin is not None:
                    self.reserved.now -= unmap(block)
                elif block.whole and address in (None, block.address):
                    self._give_back(block)

    def cached_blocks(self) -> list[int]:
        """Sizes of the cached blocks, largest first."""
        return sorted((size for pool in self._pools.values() for size, _, _ in pool.cached), reverse=True)

    def _pool(self, small: bool, stream: int) -> Pool:
        page = SMALL_SEGMENT if small else self.settings.large_segment
        self._pools[small, stream] = pool = Pool(small, stream, page, self._clocks[small])
        return pool

    def _origin(self) -> int:
        """The address of a new expandable range, above everything."""
        origin = (self._next // RANGE + 1) * RANGE
        self._next = origin + RANGE
        return origin

    def _cache(self, block: Block) -> None:
        self.requested.now -= block.wanted
        self.active.now -= block.size
        block.free, block.wanted = True, 0
        melt(block)
        block.pool.put(block)

    def _search(self, pool: Pool, rounded: int) -> Block | None:
        """The best cached block, taken out of its pool."""
        pool.clock[0] += 1
        cached, limit = pool.cached, self.settings.max_split
        index = bisect_left(cached, (rounded,))
        if index == len(cached):
            return None
        block = cached[index][2]
        if self.settings.expandable:
            # A block at the end of an expandable segment counts as what it may grow to.
            while index + 1 < len(cached) and cached[index + 1][2].growth < block.growth:
                index += 1
                block = cached[index][2]
        if limit is not None:
            if rounded < limit <= block.size:
                return None
            if rounded >= limit and block.size >= rounded + self.settings.non_split_rounding:
                return None
        del cached[index]
        return block

    def _grow(self, pool: Pool, rounded: int, at: int | None) -> Block | None:
        """A block from the driver; cached segments are given back when it has none."""
        if self.allowed is not None and self.settings.gc_threshold > 0:
            self._collect(self.settings.gc_threshold * self.allowed)
        block = self._ask(pool, rounded, at)
        if block is None and self._release_one(pool, rounded):
            block = self._ask(pool, rounded, at)
        if block is None:
            self.release()
            self.retries += 1
            block = self._ask(pool, rounded, at)
        return block

    def _ask(self, pool: Pool, rounded: int, at: int | None) -> Block | None:
        size = self.settings.segment(rounded)
        if self.allowed is not None and self.reserved.now + size > self.allowed:
            return None
        if self.settings.expandable:
            return expand(pool, rounded, self._take, self._origin)
        if not self._take(size):
            return None
        block = Block(self._next if at is None else at, size, pool)
        self._next += size
        return block

    def _take(self, size: int) -> bool:
        if self.capacity is not None and self.reserved.now + size > self.capacity:
            return False
        self.segments += 1
        self.reserved.add(size)
        return True

    def _splits(self, block: Block, rounded: int) -> bool:
        rest = block.size - rounded
        if block.pool.small or self.settings.expandable:
            return rest >= UNIT
        return rest > LARGE_REST and (self.settings.max_split is None or rounded < self.settings.max_split)

    def _give_back(self, block: Block) -> None:
        block.pool.drop(block)
        self.reserved.now -= block.size

    def _release_one(self, pool: Pool, rounded: int) -> bool:
        """With a split limit: one cached block beyond it that holds the request, or the largest that together do."""
        limit = self.settings.max_split
        if limit is None or self.settings.expandable:
            return False
        wanted = max(rounded, limit)
        index = bisect_left(pool.cached, (wanted,))
        if index < len(pool.cached):
            self._give_back(pool.cached[index][2])
            return True
        given = 0
        while given < wanted and pool.cached and pool.cached[-1][0] >= limit:
            given += pool.cached[-1][0]
            self._give_back(pool.cached[-1][2])
        return given >= wanted

    def _collect(self, threshold: float) -> None:
        """Give back cached large segments that no request took for longer than their mean, until below the limit."""
        missing = self.reserved.now - threshold
        old = [b for p in self._pools.values() if not p.small for _, _, b in p.cached if b.whole and b.origin is None]
        while missing > 0 and old:
            ages = {id(b): b.pool.clock[0] - b.born for b in old}
            mean = sum(ages.values()) / len(old)
            # Blocks of at least the mean age: there is always one.
            for block in [b for b in old if ages[id(b)] >= mean]:
                missing -= block.size
                old.remove(block)
                self._give_back(block)
