"""Tensors that wait on disk: to the bit, once a storage, safe when changed, dropped, run again or short of room."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.core import disk
from skimp.core.disk import DiskTier, file_system, open_unnamed
from skimp.core.errors import OffloadError, RecipeError
from skimp.core.pinned import HostTier
from skimp.core.saved import Saved
from skimp.core.state_file import StateFile
from skimp.core.through_host import DiskThroughHost
from skimp.core.tiers import GRAIN, PlaceError, SimulatedDisk, Traffic


@pytest.fixture
def tier(tmp_path: Path) -> Any:
    made = DiskTier(tmp_path)
    yield made
    made.close()


def run(saved: Saved, call: Callable[[], Tensor], stay: tuple[Tensor, ...] = ()) -> Tensor:
    """One block's forward, whose tensors are all away when it is over."""
    group = saved.begin(stay)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        out = call()
    saved.end(all_leave=True)
    out.register_hook(lambda _: saved.backward(group, None))
    return out


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 123, 123),
        torch.randn(7, 300).t(),
        torch.randn(3, 4, 500)[:, 1:3, ::7],
        torch.randn(10, 1001)[3:8],
        torch.randn(64, 37, dtype=torch.bfloat16),
        torch.randn(64, 37, dtype=torch.float64),
        torch.rand(9, 999) > 0.5,
        torch.arange(5000, dtype=torch.int16),
        torch.randn(8, 1, 301).expand(8, 6, 301),
        torch.zeros(0, 5),
        torch.tensor(3.0),
        torch.randn(3001, dtype=torch.complex64),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{tuple(t.stride())}",
)
def test_what_comes_back_is_what_went_with_its_strides(tier: DiskTier, tensor: Tensor) -> None:
    saved = Saved(tier, least=1)
    before, strides = tensor.clone(), tensor.stride()
    saved.begin(())
    kept = saved.pack(tensor)
    saved.end(all_leave=True)
    aligned = tensor.data_ptr() % 64
    found = saved.unpack(kept)
    assert torch.equal(found, before)
    assert found.dtype == before.dtype
    assert found.stride() == strides
    if tensor.numel():
        assert found.data_ptr() != tensor.data_ptr()
        assert found.data_ptr() % 64 == aligned


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag, lambda x: x.conj().t()], ids=range(3))
def test_a_view_that_negates_keeps_its_numbers(tier: DiskTier, view: Callable[[Tensor], Tensor]) -> None:
    """A conjugate is its storage and a bit; so is the imaginary part of one."""
    x = torch.randn(60, 50, dtype=torch.complex128, requires_grad=True)
    saved = Saved(tier, least=1)
    run(saved, lambda: (view(x) * view(x)).abs().sum()).backward()
    found, x.grad = x.grad, None
    (view(x) * view(x)).abs().sum().backward()
    assert torch.equal(found, x.grad)


def test_a_storage_is_written_once_however_often_it_is_kept(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    x = torch.randn(50, 60, requires_grad=True)
    y = x * 2.0
    saved.begin(())
    kept = [saved.pack(t) for t in (y, y, y.view(3000), y.view(10, 300), y[:40], y.t())]
    saved.end(all_leave=True)
    assert saved.stored == 1
    assert tier.written == y.nbytes
    assert all(torch.equal(saved.unpack(k).reshape(-1)[:9], y.reshape(-1)[:9]) for k in kept[:5])


def test_cuts_of_one_storage_do_not_collide(tier: DiskTier) -> None:
    """q, k and v of one product share storage, shape and strides."""
    saved = Saved(tier, least=1)
    fused = torch.randn(40, 3 * 96)
    saved.begin(())
    kept = [saved.pack(part) for part in fused.chunk(3, 1)]
    saved.end(all_leave=True)
    for k, part in zip(kept, fused.chunk(3, 1), strict=True):
        assert torch.equal(saved.unpack(k), part)
    assert saved.stored == 1


def test_a_small_part_of_a_storage_goes_alone(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    rows = torch.randn(1000, 33)[500:510]
    saved.begin(())
    kept = saved.pack(rows)
    saved.end(all_leave=True)
    assert rows.nbytes <= tier.written < rows.nbytes + 64
    assert torch.equal(saved.unpack(kept), rows)


def test_an_address_that_is_used_again_is_another_storage(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    kept, values, addresses = [], [], set()
    for value in range(20):
        x = torch.full((5000,), float(value))
        addresses.add(x.data_ptr())
        saved.begin(())
        kept.append(saved.pack(x))
        saved.end(all_leave=True)
        values.append(value)
        del x
    assert len(addresses) < 20, "nothing was used again; the test shows nothing"
    assert [float(saved.unpack(k)[4999]) for k in kept] == values


@pytest.mark.parametrize("when", ["before it has gone", "after it has gone"])
def test_a_tensor_changed_in_place_is_refused_as_autograd_does(tier: DiskTier, when: str) -> None:
    saved = Saved(tier, least=1)
    x = torch.randn(60, 50, requires_grad=True)
    y = x * 2.0
    group = saved.begin(())
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        z = y * y
    if when == "before it has gone":
        y.add_(1.0)
    saved.end(all_leave=True)
    if when == "after it has gone":
        y.add_(1.0)
    saved.backward(group, None)
    with pytest.raises(OffloadError, match="changed in place"):
        z.sum().backward()


def test_parameters_and_what_blocks_share_stay(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    weight = torch.nn.Parameter(torch.randn(70, 70))
    saved.begin((weight,))
    assert saved.pack(weight) is weight
    assert isinstance(saved.pack(weight.t()), Tensor)
    saved.end(all_leave=True)
    assert saved.stored == 0


def test_memory_is_free_while_it_is_away_and_room_is_free_after_backward(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    seen: list[weakref.ref[Any]] = []

    def block() -> Tensor:
        y = x.exp()
        seen.append(weakref.ref(y.untyped_storage()))
        return y.sin()

    out = run(saved, block)
    assert seen[0]() is None, "exp's result is still in memory"
    assert tier.used == -(-x.nbytes // GRAIN) * GRAIN  # exp keeps its result, which is sin's input: one storage
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().exp() * x.detach().exp().cos())
    del out
    assert tier.used == 0


def test_a_graph_that_is_kept_can_be_run_again(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, dtype=torch.float64, requires_grad=True)
    out = run(saved, lambda: (x.exp() * x).tanh())
    once = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(out.sum(), x)[0]
    assert torch.equal(once, again)
    assert torch.equal(once, torch.autograd.grad((x.exp() * x).tanh().sum(), x)[0])


def test_two_graphs_at_once(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    one, two = run(saved, lambda: x.exp().sin()), run(saved, lambda: x.cos().exp())
    two.sum().backward()
    second, x.grad = x.grad, None
    one.sum().backward()
    assert torch.equal(second, torch.autograd.grad(x.cos().exp().sum(), x)[0])
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_a_dropped_graph_gives_its_room_back(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)

    def broken() -> Tensor:
        y = x.exp().sin()
        raise ValueError(f"in the middle, {y.shape}")

    with pytest.raises(ValueError, match="in the middle"):
        run(saved, broken)
    saved.discard()
    gc.collect()
    assert tier.used == 0
    out = run(saved, lambda: x.exp().sin())
    size = tier.size
    del out
    run(saved, lambda: x.exp().sin()).sum().backward()
    assert tier.size == size, "room that was given back was not used again"


class _Slow(DiskTier):
    """Writes wait for `let`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.let = threading.Event()

    def _write(self, *args: Any) -> None:
        self.let.wait(10)
        super()._write(*args)


def test_what_has_not_gone_yet_is_handed_back_and_never_read(tmp_path: Path) -> None:
    tier = _Slow(tmp_path)
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    saved.begin(())
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        out = x.exp().sin()
    saved.end(all_leave=False)
    out.sum().backward()
    assert saved.forwarded
    assert not saved.fetched
    assert tier.fetched == 0
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])
    tier.let.set()
    saved.discard()
    tier.close()


def test_a_byte_changed_on_disk_ends_the_backward(tier: DiskTier) -> None:
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    out = run(saved, lambda: x.exp().sin())
    os.pwrite(tier._file, b"\xff", 777)
    with pytest.raises(OffloadError, match="checksum differs"):
        out.sum().backward()


def test_a_full_disk_is_seen_when_room_is_asked_for(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    with pytest.raises(OSError, match="No space left") as caught:
        run(saved, lambda: x.exp().sin())
    assert caught.value.filename == str(tier.folder)


def test_a_write_that_fails_is_told_when_the_block_is_over(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    with pytest.raises(OSError, match="Input/output") as caught:
        run(saved, lambda: x.exp().sin())
    assert caught.value.filename == str(tier.folder)


def test_a_step_that_is_given_up_asks_nothing_of_a_place_that_failed(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Neither letting go of its entries nor dropping its graph raises again, and their room is free."""
    real = os.pwrite

    def failing(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        saved.begin(())
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            out = x.exp().sin()
        saved.discard()
        del out
        gc.collect()
    assert tier.used == 0
    assert not [w for w in recwarn.list if "Unraisable" in str(w.category)]
    assert os.pwrite is real
    run(saved, lambda: x.exp().sin()).sum().backward()
    assert torch.equal(x.grad, x.detach().exp() * x.detach().exp().cos())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_place_says_whether_it_is_full_or_fails(tier: DiskTier, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    saved = Saved(tier, least=1)
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(PlaceError) as caught:
        run(saved, lambda: torch.randn(300, 30, requires_grad=True).exp())
    assert caught.value.full is (number != errno.EIO)
    assert caught.value.errno == number


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "scratch")
    saved = Saved(tier, least=1)
    x = torch.randn(300, 30, requires_grad=True)
    out = run(saved, lambda: x.exp().sin())
    assert list((tmp_path / "scratch").iterdir()) == []
    out.sum().backward()
    tier.close()


@pytest.mark.parametrize("kind", [DiskTier, StateFile])
def test_a_file_goes_with_whoever_forgot_to_close_it(tmp_path: Path, kind: Any) -> None:
    made = kind(tmp_path)
    descriptor = made._file
    os.fstat(descriptor)
    del made
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    again = kind(tmp_path)
    again.close()
    again.close()


def test_a_folder_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mounts"
    table.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n", encoding="utf-8")
    assert file_system(tmp_path / "inside", table) == "tmpfs"
    assert file_system(Path("/"), table) == "ext4"
    monkeypatch.setattr(disk, "file_system", lambda folder: "tmpfs")
    with pytest.raises(RecipeError, match="type tmpfs"):
        open_unnamed(tmp_path / "inside")


def test_a_tier_grows_to_its_largest_step_and_no_further() -> None:
    tier = SimulatedDisk()
    for _ in range(3):
        extents = [tier.reserve(n) for n in (10_000, 5, 10_000)]
        assert len({e.offset for e in extents}) == 3
        for extent in extents:
            tier.release(extent)
    assert tier.used == 0
    assert tier.peak == tier.size == (3 + 1 + 3) * GRAIN


class _Job:
    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self) -> None:
        self._thread.join()

    finish = wait


class Late:
    """Streams of a device that is not there: every copy comes some time later, and its source must still be itself."""

    def __init__(self) -> None:
        self.pinned_bytes, self.copies = 0, 0
        self._last: dict[str, threading.Thread] = {}

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes += nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, way: str) -> _Job:
        before, delay = self._last.get(way), 0.001 * (self.copies * 7 % 5)
        self.copies += 1

        def work() -> None:
            if before is not None:
                before.join()
            time.sleep(delay)
            target.copy_(source)

        thread = threading.Thread(target=work)
        thread.start()
        self._last[way] = thread
        return _Job(thread)


def test_late_copies_through_the_host_to_disk_never_spoil_a_number(tmp_path: Path) -> None:
    streams = Late()
    tier = DiskThroughHost(tmp_path, streams=streams)
    saved = Saved(tier, least=1)
    x = torch.randn(31, 33, requires_grad=True)
    expected = torch.autograd.grad((x.exp().sin() * x).sum(), x)[0]
    for _ in range(5):
        x.grad = None
        run(saved, lambda: x.exp().sin() * x).sum().backward()
        assert torch.equal(x.grad, expected)
    assert tier.used == 0
    assert tier.fetched > 0
    assert streams.pinned_bytes <= 3 * tier.written // 5, "pinned memory was asked for again and again"
    tier.close()


def test_late_copies_to_the_host_never_spoil_a_number() -> None:
    streams = Late()
    tier = HostTier(streams)
    saved = Saved(tier, least=1)
    x = torch.randn(31, 33, requires_grad=True)
    expected = torch.autograd.grad((x.exp().sin() * x).sum(), x)[0]
    for _ in range(5):
        x.grad = None
        run(saved, lambda: x.exp().sin() * x).sum().backward()
        assert torch.equal(x.grad, expected)
    assert tier.used == 0
    assert streams.pinned_bytes == tier.size == tier.peak, "pinned memory was asked for again"
    tier.close()


def test_a_tier_counts_what_moved_how_long_it_took_and_what_was_waited_for(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock of each thread's own that goes on by one whenever it is read: every interval is one second."""
    own = threading.local()

    def clock() -> float:
        own.now = getattr(own, "now", 0) + 1
        return float(own.now)

    monkeypatch.setattr(disk.time, "perf_counter", clock)
    storage = torch.arange(500, dtype=torch.uint8).untyped_storage()
    extent = tier.reserve(500)
    tier.store(extent, storage, 0).wait()
    assert tier.traffic() == Traffic(500, 0, 1.0, 1.0)
    before, unasked = tier.traffic(), [tier.fetch(extent, storage), tier.fetch(extent, storage)]
    unasked[1].wait()
    assert tier.traffic() == Traffic(500, 1000, 3.0, 2.0)
    assert tier.traffic().plus(before, -1) == Traffic(0, 1000, 2.0, 1.0)
    assert tier.traffic().plus(before, -1).hidden == 0.5
    assert Traffic(10, 10).hidden is None
    assert Traffic(1, 1, 1.0, 3.0).hidden == 0.0


def test_copies_through_a_host_are_counted_as_well(tmp_path: Path) -> None:
    tier = DiskThroughHost(tmp_path, streams=Late())
    saved = Saved(tier, least=1)
    run(saved, lambda: torch.randn(31, 33, requires_grad=True).exp().sin()).sum().backward()
    found = tier.traffic()
    assert found.out == tier.written > 0
    assert found.back == tier.fetched > 0
    assert found.moving > 0
    assert found.waited > 0
    tier.close()
