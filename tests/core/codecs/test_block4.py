"""The 4-bit codec: its maps, its layout, its error bound, odd sizes, and what it refuses."""

from __future__ import annotations

import numpy
import pytest
import torch

from skimp.core.codecs import Block4, from_meta
from skimp.core.codecs.block4_map import codebook4, midpoints4
from skimp.core.errors import SkimpError
from skimp.core.memory.oracle import witness
from skimp.core.workspace import workspace_bytes

SIGNED = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]


def test_the_maps_are_those_of_the_paper() -> None:
    expected = numpy.array([-x for x in reversed(SIGNED)] + [0.0, *SIGNED, 1.0], dtype=numpy.float32)
    numpy.testing.assert_allclose(codebook4(True), expected, rtol=1e-6)
    numpy.testing.assert_array_equal(codebook4(False), numpy.arange(1, 17, dtype=numpy.float32) / 16)
    for signed in (True, False):
        assert (numpy.diff(codebook4(signed)) > 0).all()
        assert len(midpoints4(signed)) == 15


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(1,), (127,), (129, 3), (65536 + 77,), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_entries_and_bytes_the_formula(
    shape: tuple[int, ...], signed: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x if signed else x.abs()
    codec = Block4(signed)
    parts = codec.encode(x)
    assert sum(t.nbytes for t in parts.values()) == codec.nbytes(shape)
    n = x.numel()
    flat = torch.zeros(-(-n // 128) * 128)
    flat[:n] = x.float().view(-1)
    blocks = flat.view(-1, 128)
    scale = blocks.abs().amax(1, keepdim=True)
    entries = torch.from_numpy(codebook4(signed).copy())
    nearest = torch.bucketize(blocks / scale.clamp_min(1e-38), torch.from_numpy(midpoints4(signed).copy()))
    expected = (entries[nearest] * scale).view(-1)[:n].view(shape)
    assert torch.equal(codec.decode(parts, shape, torch.float32), expected)
    bound = 0.1126 if signed else 0.0626
    assert ((expected - x.float()).abs() <= bound * scale.repeat_interleave(128)[:n].view(shape)).all()


def test_two_numbers_of_a_block_share_a_byte_half_a_block_apart() -> None:
    x = torch.zeros(128)
    x[3], x[3 + 64] = 1.0, -0.5
    codes = Block4().encode(x)["codes"]
    assert int(codes[3]) == 15 + 16 * 2  # +1, and −0.4375 (the nearest to −0.5)
    assert int(codes[4]) == 7 + 16 * 7


def test_zero_stays_zero_in_a_first_moment_and_never_appears_in_a_second() -> None:
    assert torch.equal(
        Block4(True).decode(Block4(True).encode(torch.zeros(200)), (200,), torch.float32), torch.zeros(200)
    )
    x = torch.zeros(200)
    x[0] = 1.0
    back = Block4(False).decode(Block4(False).encode(x), (200,), torch.float32)
    assert torch.equal(back[1:128], torch.full((127,), 1 / 16))
    constant = torch.full((128,), 0.3)
    assert torch.equal(Block4(True).decode(Block4(True).encode(constant), (128,), torch.float32), constant)


def test_it_is_rebuilt_from_meta_and_says_what_is_not_finite() -> None:
    assert from_meta(Block4(False).meta()) == Block4(False)
    x = torch.randn(300)
    assert bool(Block4().finite(Block4().encode(x)))
    x[200] = float("nan")
    assert not bool(Block4().finite(Block4().encode(x)))
    with pytest.raises(SkimpError, match="bytes of codes"):
        Block4().decode(Block4().encode(x), (500,), torch.float32)
    with pytest.raises(SkimpError, match="int64"):
        Block4().encode(torch.arange(4))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("n", [100, 70_000])
def test_workspace_is_what_is_allocated(n: int, signed: bool) -> None:
    x, codec = torch.randn(n), Block4(signed)
    parts = codec.encode(x)
    out = 4 * n
    found = witness(lambda: codec.encode(x))[1].peak
    assert found == workspace_bytes("skimp::block4_encode", (x, signed)) + codec.nbytes((n,))
    found = witness(lambda: codec.decode(parts, (n,), torch.float32))[1].peak
    arguments = (parts["codes"], parts["absmax"], n, signed, torch.float32)
    assert found == workspace_bytes("skimp::block4_decode", arguments) + out
