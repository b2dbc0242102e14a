"""The CUDA caching allocator's model on hand-made traces, by the published rules, and against a naive one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from skimp.core.errors import OutOfMemory, SkimpError
from skimp.core.memory.cuda_allocator import CudaAllocator
from skimp.core.memory.cuda_blocks import Block
from skimp.core.memory.cuda_settings import DEFAULTS, MIB, AllocatorSettings, read_settings, settings_here

EXPANDABLE = AllocatorSettings(expandable=True)
SPLIT = AllocatorSettings(max_split=40 * MIB)


@pytest.mark.parametrize(
    ("request_", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (511, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 12 * MIB),  # the rest of 2 MiB less 512 B is more than 1 MiB: it is split off below
        (21 * MIB, 22 * MIB, 22 * MIB),
    ],
)
def test_rounding_pools_and_segments(request_: int, block: int, segment: int) -> None:
    """Point 3 of what a simulation must show. A rest of up to 1 MiB stays with a large block."""
    allocator = CudaAllocator()
    allocator.malloc(request_)
    rounded = -(-request_ // 512) * 512
    rest = segment - rounded
    kept = segment if request_ > MIB and rest <= MIB else rounded
    assert allocator.requested.peak == request_
    assert allocator.allocated.peak == kept
    assert kept == block or request_ == 10 * MIB + 1
    assert allocator.reserved.peak == segment


def test_a_small_rest_is_split_off_from_512_bytes_on_and_a_large_one_above_1_mib() -> None:
    allocator = CudaAllocator()
    for wanted, size in ((9 * MIB, 10 * MIB), (9 * MIB - 512, 9 * MIB - 512)):
        allocator.free(allocator.malloc(10 * MIB))
        block = allocator.malloc(wanted)
        assert block.size == size
        allocator.free(block)
    small = CudaAllocator()
    blocks = [small.malloc(2**20 - 512), small.malloc(2**20), small.malloc(512)]
    assert [b.size for b in blocks] == [2**20 - 512, 2**20, 512]
    assert small.reserved.peak == 2 * MIB
    assert small.allocated.now == small.reserved.now


def test_neighbours_melt_and_the_whole_is_reused() -> None:
    allocator = CudaAllocator()
    a, b, c = (allocator.malloc(5 * MIB) for _ in range(3))
    assert allocator.reserved.now == 20 * MIB
    allocator.free(a)
    allocator.free(c)  # melts with the 5 MiB that nobody took
    assert allocator.cached_blocks() == [10 * MIB, 5 * MIB]
    allocator.free(b)
    assert allocator.cached_blocks() == [20 * MIB]
    assert allocator.malloc(20 * MIB).address == a.address
    assert allocator.reserved.peak == 20 * MIB


def test_fragments_of_two_segments_do_not_serve_one_request() -> None:
    allocator = CudaAllocator()
    blocks = [allocator.malloc(6 * MIB) for _ in range(6)]
    assert allocator.reserved.now == 40 * MIB
    for block in blocks[::2]:
        allocator.free(block)
    allocator.malloc(14 * MIB)
    assert allocator.reserved.now == 54 * MIB
    assert allocator.allocated.now == 32 * MIB


def test_best_fit_takes_the_smallest_that_holds_and_of_equals_the_lowest() -> None:
    allocator = CudaAllocator()
    held = [allocator.malloc(n * MIB) for n in (30, 12, 16, 12)]
    for block in held:
        allocator.free(block)
    assert allocator.malloc(11 * MIB).address == held[1].address
    assert allocator.malloc(12 * MIB).address == held[3].address
    assert allocator.malloc(12 * MIB).address == held[2].address
    assert allocator.reserved.peak == 70 * MIB


def test_streams_and_pools_do_not_share() -> None:
    allocator = CudaAllocator()
    allocator.free(allocator.malloc(12 * MIB, stream=1))
    allocator.malloc(12 * MIB, stream=2)
    allocator.malloc(MIB, stream=1)
    assert allocator.reserved.now == 26 * MIB


def test_a_block_used_on_another_stream_waits_for_it() -> None:
    allocator = CudaAllocator()
    block = allocator.malloc(12 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert (allocator.allocated.now, allocator.active.now) == (0, 12 * MIB)
    allocator.malloc(12 * MIB)
    assert allocator.reserved.now == 24 * MIB
    allocator.synchronise()
    assert allocator.active.now == 12 * MIB
    allocator.malloc(12 * MIB)
    assert allocator.reserved.now == 24 * MIB


def test_pressure_gives_back_whole_cached_segments_and_tries_again() -> None:
    allocator = CudaAllocator(capacity=50 * MIB)
    first, second, third = (allocator.malloc(n * MIB) for n in (12, 18, 6))
    assert allocator.reserved.now == 50 * MIB
    allocator.free(first)
    allocator.free(second)
    allocator.malloc(30 * MIB)  # neither cached block holds it; together they make room
    assert allocator.retries == 1
    assert allocator.reserved.now == 50 * MIB
    with pytest.raises(OutOfMemory, match=r"no cached block holds it; 14.7 MB lie in pieces"):
        allocator.malloc(16 * MIB)
    allocator.free(third)
    allocator.malloc(20 * MIB)
    assert (allocator.allocated.now, allocator.reserved.now) == (50 * MIB, 50 * MIB)


def test_a_split_limit_keeps_large_blocks_whole_and_for_large_requests() -> None:
    allocator = CudaAllocator(SPLIT)
    large = allocator.malloc(60 * MIB)
    allocator.free(large)
    allocator.malloc(30 * MIB)  # below the limit: may not take a block at or above it
    assert allocator.reserved.now == 90 * MIB
    allocator.malloc(40 * MIB)  # 60 is 20 more than asked: too much
    assert allocator.reserved.now == 130 * MIB
    block = allocator.malloc(40 * MIB + 512)
    assert block.address == large.address
    assert block.size == 60 * MIB  # and is not split
    loose = CudaAllocator(AllocatorSettings(max_split=40 * MIB, non_split_rounding=30 * MIB))
    loose.free(loose.malloc(60 * MIB))
    assert loose.malloc(40 * MIB).size == 60 * MIB


def test_under_a_split_limit_only_as_many_large_segments_go_back_as_are_needed() -> None:
    allocator = CudaAllocator(SPLIT, capacity=200 * MIB)
    held = [allocator.malloc(n * MIB) for n in (50, 60, 70)]
    for block in held:
        allocator.free(block)
    allocator.malloc(30 * MIB)  # one of at least the limit: the smallest such, 50
    assert allocator.reserved.now == 160 * MIB
    assert allocator.retries == 0
    allocator.malloc(100 * MIB)  # 70 and then 60, largest first
    assert allocator.reserved.now == 130 * MIB
    assert allocator.retries == 0


def test_garbage_collection_frees_the_cached_segments_of_at_least_the_mean_age() -> None:
    settings = AllocatorSettings(gc_threshold=0.3)
    allocator = CudaAllocator(settings, allowed=100 * MIB)
    old, young = allocator.malloc(30 * MIB), allocator.malloc(20 * MIB)
    allocator.free(old)
    for _ in range(5):
        allocator.free(young)
        young = allocator.malloc(20 * MIB)
    allocator.free(young)
    assert allocator.reserved.now == 50 * MIB
    allocator.malloc(36 * MIB)  # 50 of 100 reserved: 20 to reclaim, and the 30 MiB are the older
    assert allocator.reserved.now == 56 * MIB
    without = CudaAllocator(settings)
    without.free(without.malloc(30 * MIB))
    without.malloc(36 * MIB)
    assert without.reserved.now == 66 * MIB


def test_expandable_segments_grow_by_pages_and_have_no_holes() -> None:
    allocator = CudaAllocator(EXPANDABLE)
    allocator.malloc(1)
    assert allocator.reserved.now == 2 * MIB
    blocks = [allocator.malloc(6 * MIB) for _ in range(6)]
    assert allocator.reserved.now == 42 * MIB  # two pages of 20 MiB hold 36
    assert [b.address - blocks[0].address for b in blocks] == [n * 6 * MIB for n in range(6)]
    for block in blocks:
        allocator.free(block)
    assert allocator.cached_blocks()[0] == 40 * MIB
    allocator.malloc(50 * MIB)  # the cached 40 grow by one page
    assert allocator.reserved.now == 62 * MIB
    tail = allocator.malloc(10 * MIB)
    assert tail.size == 10 * MIB
    assert allocator.reserved.now == 62 * MIB


def test_an_expandable_rest_is_split_off_from_512_bytes_on() -> None:
    allocator = CudaAllocator(EXPANDABLE)
    assert allocator.malloc(20 * MIB - 512).size == 20 * MIB - 512
    assert allocator.cached_blocks() == [512]


def test_under_pressure_expandable_pages_are_unmapped_and_holes_filled_first() -> None:
    allocator = CudaAllocator(EXPANDABLE, capacity=80 * MIB)
    first, middle, last = (allocator.malloc(n * MIB) for n in (10, 50, 20))
    assert allocator.reserved.now == 80 * MIB
    allocator.free(middle)
    held = allocator.malloc(20 * MIB, stream=3)  # another segment: pages of the hole have to go back
    assert allocator.retries == 1
    assert allocator.reserved.now == 60 * MIB  # 10 MiB of the hole share a page with the first block
    assert allocator.cached_blocks() == [10 * MIB]
    allocator.free(held)
    block = allocator.malloc(30 * MIB)  # the cached 10 and one page mapped behind them
    assert block.address == first.address + 10 * MIB
    assert last.address == block.address + 50 * MIB
    assert allocator.reserved.now == 80 * MIB


def test_the_fraction_of_memory_allowed_is_a_limit() -> None:
    allocator = CudaAllocator(allowed=30 * MIB)
    allocator.malloc(20 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(12 * MIB)
    allocator.malloc(10 * MIB)


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [(3000, 4, 3072), (2000, 4, 2048), (33 * MIB, 8, 36 * MIB), (32 * MIB, 8, 32 * MIB), (63 * MIB, 2, 64 * MIB)],
)
def test_rounding_to_divisions_of_a_power_of_two(size: int, divisions: int, rounded: int) -> None:
    assert read_settings(f"roundup_power2_divisions:{divisions}").rounded(size) == rounded


def test_divisions_by_size() -> None:
    """The example of torch's own test of its settings."""
    found = read_settings("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]")
    wanted = {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 40960: 1}
    assert {mib: found.divisions[min(mib.bit_length() - 1, 15)] for mib in wanted} == wanted
    assert found.rounded(65 * MIB) == 72 * MIB
    assert found.rounded(129 * MIB) == 192 * MIB
    assert found.rounded(2049 * MIB + 1) == 2049 * MIB + 512


def test_settings_are_read_as_torch_writes_them() -> None:
    text = "backend:native,max_split_size_mb:128, expandable_segments:True,garbage_collection_threshold:0.8"
    found = read_settings(text)
    assert found == AllocatorSettings(expandable=True, max_split=128 * MIB, gc_threshold=0.8)
    mixed = read_settings("roundup_power2_divisions:[4:2,>:8],max_non_split_rounding_mb:30,large_segment_size_mb:40")
    for one in (found, mixed):
        assert read_settings(one.describe()) == one
    assert settings_here({"PYTORCH_CUDA_ALLOC_CONF": text}) == found
    assert settings_here({"PYTORCH_ALLOC_CONF": "large_segment_size_mb:40", "PYTORCH_CUDA_ALLOC_CONF": text}) == (
        AllocatorSettings(large_segment=40 * MIB)
    )
    assert settings_here({}) == DEFAULTS
    assert DEFAULTS.describe() == "torch's defaults"


@pytest.mark.parametrize(
    "text", ["max_split_size_mb:20", "expandable_segments:yes", "garbage_collection_threshold:1.5", "x:1"]
)
def test_settings_that_torch_refuses_are_refused(text: str) -> None:
    if text == "x:1":
        assert read_settings(text) == DEFAULTS  # of other parts of torch
        return
    with pytest.raises(SkimpError, match=text.replace(".", r"\.")):
        read_settings(text)


class Naive:
    """The same rules by scanning a list of segments of [size, in use] pieces; addresses are (segment, offset)."""

    def __init__(self, settings: AllocatorSettings, capacity: int) -> None:
        self.settings, self.capacity = settings, capacity
        self.segments: list[tuple[bool, list[list[Any]]] | None] = []

    def reserved(self) -> int:
        return sum(size for s in self.segments if s for size, _ in s[1])

    def malloc(self, size: int, name: int) -> bool:
        want = self.settings.rounded(size)
        small, limit = want <= MIB, self.settings.max_split or 2**60
        place = self.find(want, small, limit)
        if place == "too large" or place is None:
            new = self.settings.segment(want)
            if self.reserved() + new > self.capacity:
                free = [
                    (s[1][0][0], i) for i, s in enumerate(self.segments) if s and len(s[1]) == 1 and s[1][0][1] is None
                ]
                enough = self.give_back(free, small, want)
                if not enough or self.reserved() + new > self.capacity:
                    for i, s in enumerate(self.segments):
                        if s and len(s[1]) == 1 and s[1][0][1] is None:
                            self.segments[i] = None
                if self.reserved() + new > self.capacity:
                    return False
            self.segments.append((small, [[new, None]]))
            place = (len(self.segments) - 1, 0)
        number, index = place
        pieces = self.segments[number][1]  # type: ignore[index]
        rest = pieces[index][0] - want
        if rest >= 512 if small else (rest > MIB and want < limit):
            pieces[index][0] = want
            pieces.insert(index + 1, [rest, None])
        pieces[index][1] = name
        return True

    def give_back(self, free: list[tuple[int, int]], small: bool, want: int) -> bool:
        """Segments at or above the split limit: one that is large enough, or the largest until they are."""
        limit = self.settings.max_split
        if limit is None:
            return False
        mine = sorted(f for f in free if self.segments[f[1]][0] == small and f[0] >= limit)  # type: ignore[index]
        large = [f for f in mine if f[0] >= max(want, limit)]
        given = 0
        for size, i in large[:1] or reversed(mine):
            if given < max(want, limit):
                self.segments[i] = None
                given += size
        return given >= max(want, limit)

    def find(self, want: int, small: bool, limit: int) -> Any:
        found = [
            (size, number, index)
            for number, s in enumerate(self.segments)
            if s and s[0] == small
            for index, (size, used) in enumerate(s[1])
            if used is None and size >= want
        ]
        if not found:
            return None
        size, number, index = min(found)
        if want < limit <= size or (want >= limit and size >= want + self.settings.non_split_rounding):
            return "too large"
        return number, index

    def free(self, name: int) -> None:
        for s in self.segments:
            for index, piece in enumerate(s[1] if s else ()):
                if piece[1] == name:
                    piece[1] = None
                    pieces = s[1]  # type: ignore[index]
                    for at in (index, index - 1):
                        if 0 <= at < len(pieces) - 1 and pieces[at][1] is None and pieces[at + 1][1] is None:
                            pieces[at][0] += pieces.pop(at + 1)[0]
                    return


@pytest.mark.parametrize(
    "settings", [DEFAULTS, SPLIT, AllocatorSettings(divisions=(4,) * 16)], ids=lambda s: s.describe()
)
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_naive_allocator_on_random_traces(settings: AllocatorSettings, seed: int) -> None:
    drawn = random.Random(seed)
    capacity = 500 * MIB
    model, naive = CudaAllocator(settings, capacity), Naive(settings, capacity)
    held: dict[int, Block] = {}
    failed = 0
    for name in range(1500):
        if held and drawn.random() < 0.48:
            gone = drawn.choice(sorted(held))
            model.free(held.pop(gone))
            naive.free(gone)
        else:
            top = drawn.choice([2000, MIB, 8 * MIB, 30 * MIB, 90 * MIB])
            size = drawn.randrange(1, top)
            fits = naive.malloc(size, name)
            try:
                held[name] = model.malloc(size)
                assert fits
            except OutOfMemory:
                assert not fits
                failed += 1
        assert model.reserved.now == naive.reserved(), name
    assert model.retries > failed > 0


@pytest.mark.parametrize("seed", [0, 1])
def test_expandable_book_keeping_adds_up(seed: int) -> None:
    """On random traces: pieces tile, nothing cached touches another cached block, reserved is what is mapped."""
    drawn = random.Random(seed)
    model = CudaAllocator(EXPANDABLE, capacity=300 * MIB)
    held: dict[int, Block] = {}
    for name in range(800):
        if held and drawn.random() < 0.49:
            model.free(held.pop(drawn.choice(sorted(held))))
        else:
            try:
                size = drawn.randrange(1, drawn.choice([2000, MIB, 50 * MIB]))
                held[name] = model.malloc(size, drawn.choice([0, 1]))
            except OutOfMemory:
                model.free(held.pop(next(iter(held))))
        mapped = 0
        starts = {id(b): b for b in map(first, held.values())}
        for block in starts.values():
            while block is not None:
                mapped += block.size if block.mapped else 0
                behind = block.behind
                if behind is not None:
                    assert behind.before is block
                    assert behind.address == block.address + block.size
                    assert not (block.free and behind.free and block.mapped == behind.mapped)
                block = behind  # type: ignore[assignment]
        assert mapped <= model.reserved.now <= model.capacity  # type: ignore[operator]
        assert model.allocated.now == sum(b.size for b in held.values())
        assert model.reserved.now == model.allocated.now + sum(model.cached_blocks())


def first(block: Block) -> Block:
    while block.before is not None:
        block = block.before
    return block
