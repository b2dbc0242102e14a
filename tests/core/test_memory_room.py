"""What is left before the kernel kills, read from a folder that stands for /proc and /sys."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch

from skimp.core.memory.room import FLOOR_LEAST, FLOOR_MOST, Room, floor
from skimp.core.memory.shortage import refused

KB = 1024


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, available_kb: int, swap_kb: int = 0, cgroup: str = "") -> Path:
    meminfo = f"MemTotal:       16000000 kB\nMemAvailable: {available_kb} kB\n\nSwapFree: {swap_kb} kB\n"
    put(root, "proc/meminfo", meminfo)
    put(root, "proc/self/cgroup", cgroup)
    return root


def test_the_machine_alone_with_what_it_can_swap(tmp_path: Path) -> None:
    left = Room(machine(tmp_path, 300_000)).left()
    assert left is not None
    assert (left.bytes, left.floor, left.where) == (300_000 * KB, FLOOR_MOST, "on this machine")
    left = Room(machine(tmp_path, 300_000, swap_kb=50_000)).left()
    assert left is not None
    assert left.bytes == 350_000 * KB


def test_a_group_counts_what_the_kernel_can_drop_only_when_it_is_nearly_full(tmp_path: Path) -> None:
    root, group = machine(tmp_path, 8_000_000, cgroup="0::/job\n"), "sys/fs/cgroup/job/"
    put(root, group + "memory.max", "2000000000\n")
    put(root, group + "memory.high", "max\n")
    put(root, group + "memory.current", "1000000000")
    put(root, group + "memory.stat", "anon 1\ninactive_file 60000000\nactive_file 40000000\n")
    room = Room(root)
    left = room.left()
    assert left is not None
    assert left.bytes == 1_000_000_000
    assert left.where == f"in the control group {tmp_path / 'sys/fs/cgroup/job'}"
    assert left.floor == FLOOR_LEAST
    put(root, group + "memory.current", "1950000000")
    left = room.left()
    assert left is not None
    assert left.bytes == 50_000_000 + 100_000_000
    put(root, group + "memory.high", "1960000000")  # throttled to a crawl from there on
    left = room.left()
    assert left is not None
    assert left.bytes == 10_000_000 + 100_000_000


def test_the_older_kind_of_group(tmp_path: Path) -> None:
    root = machine(tmp_path, 8_000_000, cgroup="5:cpu:/x\n4:memory:/x\n0::/\n")
    group = "sys/fs/cgroup/memory/x/memory."
    put(root, group + "limit_in_bytes", "9223372036854771712")
    assert Room(root).groups == []
    put(root, group + "limit_in_bytes", "1000000000")
    put(root, group + "usage_in_bytes", "990000000")
    put(root, group + "stat", "total_inactive_file 5000000\ntotal_active_file 1000000\ninactive_file 900\n")
    left = Room(root).left()
    assert left is not None
    assert left.bytes == 16_000_000


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert Room(tmp_path).left() is None


@pytest.mark.parametrize(
    ("total", "least"), [(1, FLOOR_LEAST), (5_000_000_000, 50_000_000), (10**12, FLOOR_MOST), (0, FLOOR_LEAST)]
)
def test_the_floor_is_a_hundredth_between_its_ends(total: int, least: int) -> None:
    assert floor(total) == least


def test_a_plan_for_all_there_is_leaves_the_floor_free() -> None:
    """Else a run that keeps to a plan for all there is would be stopped for it."""
    from skimp.plan.places import left_to_others

    left = Room().left()
    assert left is not None
    assert left_to_others(10**12) == left.floor
    assert left_to_others(5) == 5


def provoked(call: object) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        call()  # type: ignore[operator]
    return raised.value


def test_refusals_of_real_allocators_are_known() -> None:
    assert refused(provoked(lambda: torch.empty(1 << 60, dtype=torch.uint8))) == 1 << 60
    assert refused(provoked(lambda: np.empty(1 << 60, dtype=np.uint8))) == 0
    assert refused(provoked(lambda: bytearray(1 << 60))) == 0


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 1.00 GiB"), 20 << 20),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB). Tried to allocate 1.50 GB on"), 1_500_000_000),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 77 bytes."), 77),
        (RuntimeError("std::bad_alloc"), 0),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 0),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 0),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (RuntimeError("you tried to allocate 4 bytes of patience"), None),
        (ValueError("memory"), None),
    ],
)
def test_words_of_other_allocators(error: BaseException, asked: int | None) -> None:
    assert refused(error) == asked
