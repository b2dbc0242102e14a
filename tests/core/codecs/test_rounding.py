"""float32 and bf16 codecs; stochastic rounding is unbiased, addressed, and right at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from skimp.core.codecs import BF16, Codec, Dynamic8, Float32, from_meta, stochastic_round
from skimp.core.codecs.bf16 import CHUNK
from skimp.core.errors import SkimpError
from skimp.core.forms import reference_only
from skimp.core.noise import random_uint32


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("shape", "offset"), [((3, 1001), 0), ((CHUNK + 77,), 3), ((1,), 6)])
def test_rounding_is_the_definition(native, shape, offset):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if native:
        y = stochastic_round(x, 5, "w", stream=7, offset=offset)
    else:
        with reference_only():
            y = stochastic_round(x, 5, "w", stream=7, offset=offset)
    noise = (random_uint32(5, "w", offset, x.numel(), stream=7) >> 16).int().view(shape)
    expected = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.float(), expected)
    step = torch.exp2(torch.floor(torch.log2(x.abs())) - 7)
    assert ((y.float() - x).abs() < step).all()


def test_the_mean_is_right():
    n = 100_000
    x = torch.full((n,), 1.0 + 0.3 * 2**-7)
    y = stochastic_round(x, 0, "mean").double()
    assert set(y.tolist()) == {1.0, 1.0 + 2**-7}
    # standard error: step·√(0.3·0.7/n); four of them
    assert abs(y.mean() - x[0].double()) < 4 * 2**-7 * math.sqrt(0.21 / n)


@pytest.mark.parametrize("native", [True, False])
def test_edges(native):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, 1e-40])
    x = torch.cat([x, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])  # NaN, full payload
    if native:
        y = stochastic_round(x, 0, "e")
    else:
        with reference_only():
            y = stochastic_round(x, 0, "e")
    assert y[[0, 7]].isnan().all()
    assert y[1:6].tolist() == [float("inf"), -float("inf"), 0.0, 0.0, 1.5]
    assert math.copysign(1, y[4].item()) == -1
    low = torch.randn(999).bfloat16()
    assert torch.equal(stochastic_round(low, 0, "e"), low)


def test_thread_count_changes_nothing():
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = stochastic_round(x, 0, "t"), Dynamic8().encode(x)
        torch.set_num_threads(3)
        three = stochastic_round(x, 0, "t"), Dynamic8().encode(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], three[0])
    assert all(torch.equal(one[1][key], three[1][key]) for key in one[1])


@pytest.mark.parametrize("codec", [Float32(), BF16(), BF16(stochastic=True, seed=3, label="w", stream=2)])
def test_plain_codecs(codec):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).t()
    parts = codec.encode(x)
    assert isinstance(codec, Codec)
    assert from_meta(codec.meta()) == codec
    assert sum(t.numel() * t.element_size() for t in parts.values()) == codec.nbytes(x.shape)
    y = codec.decode(parts, x.shape, torch.float32)
    limit = 0.0 if isinstance(codec, Float32) else 2**-7 if codec.stochastic else 2**-8
    assert ((y - x).abs() <= limit * x.abs()).all()
    assert codec.finite(parts)
    assert not codec.finite(codec.encode(x / 0))
    with pytest.raises(SkimpError):
        codec.encode(torch.ones(3, dtype=torch.int64))


def test_streams_differ_and_repeat():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    codec = BF16(stochastic=True, label="w")
    first, second = codec.at(1).encode(x)["values"], codec.at(2).encode(x)["values"]
    assert not torch.equal(first, second)
    assert torch.equal(first, codec.at(1).encode(x)["values"])
