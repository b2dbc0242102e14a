"""Affine integers: half a step at most, whatever the signs of a group."""

from __future__ import annotations

import pytest
import torch

from skimp.core.codecs.affine import Affine
from skimp.core.errors import SkimpError


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(3, 7), (256,), (17, 130)])
@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
def test_error_is_half_a_step_of_a_range_with_zero(bits: int, shape: tuple[int, ...], shift: float) -> None:
    x, codec = torch.randn(shape) + shift, Affine(bits)
    parts = codec.encode(x)
    error = (codec.decode(parts, shape, torch.float32) - x).abs().flatten()
    steps = parts["scale"].repeat_interleave(256)[: x.numel()]
    assert bool((error <= 0.5001 * steps + 1e-6).all())
    widest = max(float(x.max()), 0.0) - min(float(x.min()), 0.0)
    assert float(parts["scale"].max()) <= widest / (2**bits - 1) * 1.0001
    assert {k: (tuple(v.shape), v.dtype) for k, v in parts.items()} == codec.spec(shape)
    assert codec.nbytes(shape) == sum(v.numel() * v.itemsize for v in parts.values())


def test_zero_is_exact_and_bad_numbers_are_seen() -> None:
    codec = Affine(4)
    x = torch.randn(300)
    x[::3] = 0
    assert bool((codec.decode(codec.encode(x), (300,), torch.float32)[::3] == 0).all())
    assert not bool(codec.decode(codec.encode(torch.zeros(5)), (5,), torch.float32).any())
    assert bool(codec.finite(codec.encode(x)))
    x[0] = float("inf")
    assert not bool(codec.finite(codec.encode(x)))
    with pytest.raises(SkimpError, match="4 or 8 bits"):
        Affine(3)
    with pytest.raises(SkimpError, match="decoding"):
        codec.decode(codec.encode(x), (600,), torch.float32)
