"""Our files are standard files, exact in every dtype, and cost at most one chunk of memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_cases import allocated_peak, awkward_tensors, dense, same
from torch.profiler import ProfilerActivity, profile

from skimp.core.errors import CheckpointError
from skimp.run import tensor_bytes
from skimp.run.safetensors_stream import SafetensorsReader, write
from skimp.run.tensor_bytes import CHUNK, Later, Spec, aligned_empty, pieces


def test_the_safetensors_library_reads_our_file(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    write(tmp_path / "f.safetensors", tensors, {"made_by": "skimp"})
    read = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert set(read) == set(tensors)
    assert all(same(read[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made_by": "skimp"}


def test_we_read_the_library_s_file(tmp_path: Path) -> None:
    tensors = {name: dense(tensor) for name, tensor in awkward_tensors().items()}
    safetensors.torch.save_file(tensors, tmp_path / "f.safetensors")
    with SafetensorsReader(tmp_path / "f.safetensors") as reader:
        assert set(reader.names()) == set(tensors)
        assert all(same(reader.read(name), tensors[name]) for name in tensors)


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path: Path) -> None:
    write(tmp_path / "f", {"u8": torch.zeros(3, dtype=torch.uint8), "f64": torch.zeros(3, dtype=torch.float64)})
    data = (tmp_path / "f").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    assert header["f64"]["data_offsets"] == [0, 24]
    assert header["u8"]["data_offsets"] == [24, 27]


def test_reading_fills_strided_targets_and_parameters_in_place(tmp_path: Path) -> None:
    value = torch.randn(6, 4)
    sums = write(tmp_path / "f", {"w": value})
    backing = torch.full((4, 12), -1.0)
    strided, parameter = backing.t()[::2], torch.nn.Parameter(torch.zeros(6, 4))
    version = parameter._version
    with SafetensorsReader(tmp_path / "f") as reader:
        reader.read_into("w", strided, sums["w"])
        reader.read_into("w", parameter, sums["w"])
    assert same(strided.contiguous(), value)
    assert same(parameter, value)
    assert torch.equal(backing.t()[1::2], torch.full((6, 4), -1.0))  # what lies between is untouched
    assert parameter._version > version  # a graph that saved the old value must notice
    assert parameter.requires_grad


@pytest.mark.parametrize("limit", [8, 24, 100, 10**6])
def test_pieces_cover_a_tensor_once_in_order_and_within_the_limit(limit: int) -> None:
    base = torch.arange(3 * 5 * 7, dtype=torch.float64).view(3, 5, 7)
    for tensor in (base, base.transpose(0, 2), base[:, ::2], base.permute(1, 0, 2)[1:], base[0, 0, 0]):
        parts = list(pieces(tensor, limit))
        assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
        assert all(part.numel() * 8 <= limit for part in parts)
    assert list(pieces(base[:0], limit)) == []


def test_chunks_smaller_than_tensors_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = awkward_tensors()
    sums = write(tmp_path / "whole", tensors)
    monkeypatch.setattr(tensor_bytes.pieces, "__defaults__", (16,))
    assert write(tmp_path / "cut", tensors) == sums
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()
    with SafetensorsReader(tmp_path / "cut") as reader:
        assert all(same(reader.read(name, sums[name]), tensors[name]) for name in tensors)


def _peaks(work) -> tuple[int, int]:
    """Peak bytes allocated by torch (c10 events) and by Python and numpy (tracemalloc) while `work` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    tracemalloc.start()
    work()
    _, python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return allocated_peak(prof.profiler.kineto_results.events()), python


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "transposed"])
def test_saving_and_loading_64_mb_take_one_chunk_at_most(tmp_path: Path, strided: bool) -> None:
    rows = 4096
    value = torch.ones(rows, 4096)  # 64 MiB
    value = value.t() if strided else value
    write(tmp_path / "f", {"w": value})  # warm: the file's pages, lazy imports
    torch_peak, python_peak = _peaks(lambda: write(tmp_path / "f", {"w": value}))
    assert torch_peak == (CHUNK if strided else 0)
    assert python_peak < 256 * 1024

    def load() -> None:
        with SafetensorsReader(tmp_path / "f") as reader:
            reader.read_into("w", value)

    torch_peak, python_peak = _peaks(load)
    assert torch_peak == (CHUNK if strided else 0)
    assert python_peak < 256 * 1024


def test_reading_allocates_the_tensor_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "f", {"w": torch.ones(1000, 1000)})
    with SafetensorsReader(tmp_path / "f") as reader:
        torch_peak, _ = _peaks(lambda: reader.read("w"))
    assert torch_peak == 4_000_000


def test_aligned_empty_is_aligned_even_when_the_allocator_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((), (0,), (3,), (5, 7)):
        tensor = aligned_empty(shape, torch.bfloat16)
        assert tensor.shape == shape
        assert tensor.data_ptr() % 64 == 0
    plain = torch.empty

    def crooked(shape, dtype):
        shape = (shape,) if isinstance(shape, int) else shape
        size = Spec(dtype, tuple(shape)).nbytes
        return plain((size + 64,), dtype=torch.uint8)[16 : 16 + size].view(dtype).view(shape)

    monkeypatch.setattr(torch, "empty", crooked)
    tensor = aligned_empty((5, 7), torch.float32)
    assert tensor.shape == (5, 7)
    assert tensor.data_ptr() % 64 == 0


def test_a_later_tensor_is_made_at_its_turn_and_must_keep_its_promise(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str, value: torch.Tensor):
        return lambda: made.append(name) or value

    spec = Spec(torch.float32, (2,))
    write(tmp_path / "f", {n: Later(spec, make(n, torch.ones(2))) for n in ("x", "y")})
    assert made == ["x", "y"]
    with pytest.raises(CheckpointError, match=r"saving 'x' as float32 \[2\]\n  found:   float32 \[3\]"):
        write(tmp_path / "f", {"x": Later(spec, lambda: torch.ones(3))})


def test_what_has_no_plain_bytes_is_refused_by_name(tmp_path: Path) -> None:
    for value, found in (
        (torch.ones(2, device="meta"), "on meta"),
        (torch.ones(2).to_sparse(), "a torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(2).as_subclass(type("Quantised", (torch.Tensor,), {})), "a Quantised"),
    ):
        with pytest.raises(CheckpointError, match=rf"saving 'w'\n  found:   .*{found}"):
            write(tmp_path / "f", {"w": value})


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    sums = write(path, {"first": torch.zeros(64), "second": torch.ones(64)})
    whole = path.read_bytes()

    def flipped(at: int) -> bytes:
        return whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]

    path.write_bytes(flipped(len(whole) - 1))
    with SafetensorsReader(path) as reader:
        reader.read("first", sums["first"])
        with pytest.raises(CheckpointError, match=r"reading 'second' .*\n  found:   crc32 .*\n.*changed on disk"):
            reader.read("second", sums["second"])
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"{len(whole) - 1} bytes where its header says {len(whole)}"):
        SafetensorsReader(path)
    for broken in (b"", whole[:5], whole[:20], flipped(8), b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match="damaged or not safetensors"):
            SafetensorsReader(path)
    path.write_bytes(whole)
    with SafetensorsReader(path) as reader:
        assert reader.header_sum == sums[""]
        with pytest.raises(CheckpointError, match="did you mean 'first'"):
            reader.read("frist")
        with pytest.raises(CheckpointError, match=r"into float32 \[63\]\n  found:   float32 \[64\] \(256 B\)"):
            reader.read_into("first", torch.zeros(63))
        with pytest.raises(CheckpointError, match=r"into float64 \[64\]"):
            reader.read_into("first", torch.zeros(64, dtype=torch.float64))
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsReader(tmp_path / "absent")
