"""Blocks of the CUDA allocator's model: pieces of segments in a chain, cached by size, and how they part and melt."""

from __future__ import annotations

from bisect import bisect_left, insort


class Block:
    """A piece of a segment: in use, cached, or (of an expandable segment) not backed by memory.

    Attributes:
        address, size: bytes.
        origin: where its expandable segment begins; None in a fixed one.
        before, behind: its neighbours in the segment.
        free, mapped: whether it is not in use, and backed by memory.
        wanted: bytes asked for, while in use.
        born: searches in its pool when it became free, for garbage collection.
        uses: other streams that used it.
    """

    __slots__ = ("address", "before", "behind", "born", "free", "mapped", "origin", "pool", "size", "uses", "wanted")

    def __init__(self, address: int, size: int, pool: Pool, origin: int | None = None) -> None:
        self.address, self.size, self.pool, self.origin = address, size, pool, origin
        self.before: Block | None = None
        self.behind: Block | None = None
        self.free = self.mapped = True
        self.wanted = self.born = 0
        self.uses: set[int] = set()

    @property
    def whole(self) -> bool:
        """Whether it is its segment, all of it."""
        return self.before is None and self.behind is None

    @property
    def growth(self) -> int:
        """Bytes of a cached block with the unmapped ones behind it."""
        behind = self.behind
        return self.size + (behind.size if behind is not None and not behind.mapped else 0)


class Pool:
    """Cached blocks of one kind and stream, smallest first, and what is not mapped, lowest address first.

    Attributes:
        page: bytes of a page of its expandable segment.
        clock: number of searches in all pools of its kind, in a list that they share.
    """

    __slots__ = ("cached", "clock", "page", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int, page: int, clock: list[int]) -> None:
        self.small, self.stream, self.page, self.clock = small, stream, page, clock
        self.cached: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def put(self, block: Block) -> None:
        """Into the cached blocks, or into those without memory."""
        if block.mapped:
            block.born = self.clock[0]
            insort(self.cached, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: Block) -> None:
        """Out of them again; before its size or address changes."""
        if block.mapped:
            del self.cached[bisect_left(self.cached, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def link(one: Block | None, other: Block | None) -> None:
    """`other` lies right behind `one`."""
    if one is not None:
        one.behind = other
    if other is not None:
        other.before = one


def cut(block: Block, size: int, mapped: bool = True) -> None:
    """Keep the first `size` bytes; the rest becomes a block in the pool."""
    rest = Block(block.address + size, block.size - size, block.pool, block.origin)
    rest.mapped = mapped
    block.size = size
    link(rest, block.behind)
    link(block, rest)
    block.pool.put(rest)


def melt(block: Block) -> None:
    """Absorb free neighbours of the same state; they leave their lists. The block itself is in none."""
    for other in (block.before, block.behind):
        if other is None or not other.free or other.mapped != block.mapped:
            continue
        other.pool.drop(other)
        if other is block.before:
            block.address = other.address
            link(other.before, block)
        else:
            link(block, other.behind)
        if block.before is other:  # it was the first of its segment
            block.before = None
        block.size += other.size
