"""Expandable segments of the CUDA allocator's model: one range of addresses a pool, backed page by page.

Pages are 2 MiB in the small pool and as large as a large segment (20 MiB) in the other. Memory is mapped at the lowest
place with room, a hole left by earlier unmapping included, so that a segment stays in one piece.
"""

from __future__ import annotations

from collections.abc import Callable

from skimp.core.memory.cuda_blocks import Block, Pool, cut, link, melt

#: Addresses an expandable segment may grow into; more than any device has.
RANGE = 1 << 47


def expand(pool: Pool, size: int, take: Callable[[int], bool], origin: Callable[[], int]) -> Block | None:
    """A block of at least `size` bytes, in no list; None when the driver has no pages left.

    Args:
        take: asks the driver for so many bytes.
        origin: the address of a new range, should one be needed.
    """
    block = _place(pool, size) or _range(pool, origin())
    if not block.mapped and not _map(block, min(block.size, size), take):
        return None
    while block.size < size:
        hole = block.behind
        if hole is None or not _map(hole, min(size - block.size, hole.size), take):
            return None
        block = hole  # it has absorbed the block before
    pool.drop(block)
    return block


def unmap(block: Block) -> int:
    """Give back the whole pages inside a cached block; returns their bytes."""
    pool, origin = block.pool, block.origin or 0
    first = origin + -(-(block.address - origin) // pool.page) * pool.page
    last = origin + (block.address + block.size - origin) // pool.page * pool.page
    if first >= last:
        return 0
    pool.drop(block)
    if block.address < first:
        front = Block(block.address, first - block.address, pool, block.origin)
        link(block.before, front)
        link(front, block)
        pool.put(front)
        block.address, block.size = first, block.size - front.size
    if last < block.address + block.size:
        cut(block, last - first)
    block.mapped = False
    melt(block)
    pool.put(block)
    return last - first


def _place(pool: Pool, size: int) -> Block | None:
    """The lowest unmapped block that, with the free one before it and those behind, has room."""
    for _, hole in pool.unmapped:
        first = hole.before if hole.before is not None and hole.before.free else hole
        room = 0
        block: Block | None = first
        while block is not None and block.free and room < size:
            room += block.size
            block = block.behind
        if room >= size:
            return first
    return None


def _range(pool: Pool, origin: int) -> Block:
    """A new range, one unmapped block of whole pages."""
    block = Block(origin, RANGE // pool.page * pool.page, pool, origin)
    block.mapped = False
    pool.put(block)
    return block


def _map(block: Block, size: int, take: Callable[[int], bool]) -> bool:
    """Back the first `size` bytes of an unmapped block by whole pages; free neighbours join."""
    pool = block.pool
    size = -(-size // pool.page) * pool.page
    if not take(size):
        return False
    pool.drop(block)
    if size < block.size:
        cut(block, size, mapped=False)
    block.mapped = True
    melt(block)
    pool.put(block)
    return True
