"""Dynamic 8-bit against bitsandbytes' published tables and reference operator, and against the definition."""

from __future__ import annotations

import pytest
import torch

from skimp.core.codecs import Dynamic8, from_meta
from skimp.core.codecs.dynamic8_lookup import BINS, FIRST_BIN
from skimp.core.codecs.dynamic8_map import codebook, midpoints, zero_code
from skimp.core.errors import SkimpError
from skimp.core.forms import reference_only

BOTH = pytest.mark.parametrize("signed", [True, False])


def sample(shape, signed, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
    return x if signed else x * x


@BOTH
def test_codebook_equals_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    table = torch.tensor(codebook(signed))
    assert torch.equal(table, functional.create_dynamic_map(signed))
    assert len(set(table.tolist())) == 256
    assert table[zero_code(signed)] == 0
    assert table[-1] == 1
    assert abs(table[0].item() - (-0.99296875 if signed else 0.0)) < 1e-6
    smallest = table[table > 0].min().item()
    assert abs(smallest - (5.5e-7 if signed else 3.25e-7)) < 1e-12


@BOTH
def test_codes_equal_bitsandbytes_reference(signed):
    """Its CPU library approximates; its plain torch form is the oracle, but for 2 ulps at a midpoint."""
    pytest.importorskip("bitsandbytes")
    x = sample((37, 1024), signed)
    operator = torch.ops.bitsandbytes.quantize_blockwise.default
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    codes, absmax = operator._op_dk(key, x, torch.tensor(codebook(signed)), 256)
    parts = Dynamic8(signed).encode(x)
    assert torch.equal(parts["absmax"], absmax)
    different = parts["codes"] != codes
    lower = torch.minimum(parts["codes"], codes)[different].long()
    u = (x.view(-1, 256) / absmax[:, None]).view(x.shape)[different]
    middle = torch.tensor(midpoints(signed))[lower]
    assert ((u - middle).abs() <= 2 * 2**-23 * middle.abs()).all()


@BOTH
@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (257,), (5, 123, 7), (70_001,)])
@pytest.mark.parametrize("native", [True, False])
def test_encode_is_the_definition(signed, shape, native):
    x = sample(shape, signed)
    x.view(-1)[: x.numel() // 3] = 0  # whole blocks of zeros
    codec = Dynamic8(signed)
    if native:
        parts = codec.encode(x)
    else:
        with reference_only():
            parts = codec.encode(x)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 256)).view(-1, 256)
    absmax = flat.abs().amax(1)
    u = flat / torch.where(absmax == 0, 1, absmax)[:, None]
    codes = torch.bucketize(u, torch.tensor(midpoints(signed))).view(-1)[: x.numel()]
    assert torch.equal(parts["absmax"], absmax)
    assert torch.equal(parts["codes"].view(-1).long(), codes)
    assert sum(t.numel() * t.element_size() for t in parts.values()) == codec.nbytes(shape)
    expected = (torch.tensor(codebook(signed))[codes] * absmax.repeat_interleave(256)[: x.numel()]).view(shape)
    assert torch.equal(codec.decode(parts, shape, torch.float32), expected)
    with reference_only():
        assert torch.equal(codec.decode(parts, shape, torch.float32), expected)
    assert torch.equal(codec.decode(parts, shape, torch.bfloat16), expected.bfloat16())


@BOTH
def test_every_bin_edge_and_midpoint(signed):
    """All floats next to a look-up edge or a midpoint: the place where the table could be wrong."""
    edges = torch.arange(FIRST_BIN, FIRST_BIN + BINS, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    points = torch.cat([edges, torch.tensor(midpoints(signed)).abs(), torch.tensor([0.0, 1e-30, 1e-45])])
    points = torch.cat([points, torch.nextafter(points, torch.tensor(0.0)), torch.nextafter(points, torch.tensor(1.0))])
    points = torch.cat([points, -points]) if signed else points
    blocks = torch.ones(-(-points.numel() // 255), 256)  # a 1 in each block makes absmax 1
    blocks[:, :255].reshape(-1)
    for i in range(blocks.shape[0]):
        piece = points[255 * i : 255 * (i + 1)]
        blocks[i, : piece.numel()] = piece
    expected = torch.bucketize(blocks, torch.tensor(midpoints(signed)))
    assert torch.equal(Dynamic8(signed).encode(blocks)["codes"].long(), expected)
    with reference_only():
        assert torch.equal(Dynamic8(signed).encode(blocks)["codes"].long(), expected)


@BOTH
def test_round_trip_bounds_and_repetition(signed):
    x = sample((3, 1000), signed)
    codec = Dynamic8(signed)
    parts = codec.encode(x)
    y = codec.decode(parts, x.shape, torch.float32)
    absmax = parts["absmax"].repeat_interleave(256)[: x.numel()].view(x.shape)
    # half the widest gap: 0.9/64/2 signed (a whole gap at −1, which has no entry), 0.9/128/2 unsigned
    bound = torch.where(x < -0.98 * absmax, 0.00705, 0.00704) if signed else torch.tensor(0.00352)
    assert ((y - x).abs() <= bound * absmax * (1 + 1e-6)).all()
    assert (y[x == absmax] == x[x == absmax]).all()
    again = codec.encode(y)
    if not signed:  # a signed block whose extreme is negative shrinks, since there is no −1
        assert torch.equal(again["codes"], parts["codes"])
        assert torch.equal(again["absmax"], parts["absmax"])


def test_denormal_blocks_keep_their_ratios():
    x = torch.tensor([1e-40, 5e-41, 0.0])
    y = Dynamic8(False).decode(Dynamic8(False).encode(x), (3,), torch.float32)
    assert y[0] == x[0]
    assert abs(y[1] / x[1] - 1) < 0.01
    assert y[2] == 0


@pytest.mark.parametrize("native", [True, False])
def test_keep_sign_moves_only_codes_of_zero(native):
    x = torch.tensor([1.0, 1e-9, -1e-9, 0.0, -0.0, 3e-7, -0.5])
    codec = Dynamic8(signed=True, keep_sign=True)
    if native:
        codes = codec.encode(x)["codes"]
    else:
        with reference_only():
            codes = codec.encode(x)["codes"]
    plain = Dynamic8(signed=True).encode(x)["codes"]
    assert codes.tolist()[1:5] == [128, 126, 127, 127]
    assert plain.tolist()[1:5] == [127, 127, 127, 127]
    assert torch.equal(codes[[0, 5, 6]], plain[[0, 5, 6]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("native", [True, False])
def test_non_finite_is_flagged_by_its_block(value, native):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    codec = Dynamic8()
    assert codec.finite(codec.encode(x))
    x[300] = value
    if native:
        parts = codec.encode(x)
    else:
        with reference_only():
            parts = codec.encode(x)
    assert not codec.finite(parts)
    assert torch.isfinite(parts["absmax"]).tolist() == [True, False, True, True]
    assert codec.decode(parts, x.shape, torch.float32)[256:512].isnan().any()


def test_any_layout_and_dtype():
    x = sample((40, 30), True)
    codec = Dynamic8()
    assert torch.equal(codec.encode(x.t())["codes"], codec.encode(x.t().contiguous())["codes"])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        low = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert torch.equal(codec.encode(low)["codes"], codec.encode(low.float())["codes"])
    empty = codec.encode(torch.empty(0))
    assert codec.decode(empty, (0,), torch.float32).shape == (0,)


def test_refusals_and_meta():
    codec = Dynamic8(signed=False, keep_sign=True)
    assert from_meta(codec.meta()) == codec
    with pytest.raises(SkimpError, match="int64"):
        codec.encode(torch.arange(5))
    with pytest.raises(SkimpError, match="5 codes"):
        codec.decode(codec.encode(torch.ones(5)), (6,), torch.float32)
    with pytest.raises(SkimpError, match="nonsense"):
        from_meta({"codec": "dynamic8", "nonsense": 1})
    with pytest.raises(SkimpError, match="did you mean 'dynamic8'"):
        from_meta({"codec": "dynamic"})
