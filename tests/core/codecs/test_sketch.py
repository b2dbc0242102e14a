"""Learned codebooks: exact where they can be, nearest values, error that falls, packing, importance."""

from __future__ import annotations

import pytest
import torch

from skimp.core.codecs import Int4, Sketch, from_meta
from skimp.core.codecs.sketch import cluster, nearest
from skimp.core.coded_linear import CodedLinear
from skimp.core.errors import SkimpError

CODECS = pytest.mark.parametrize("codec", [Sketch(), Sketch(4, 3), Sketch(2), Sketch(2, 4)], ids=str)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@CODECS
@pytest.mark.parametrize("shape", [(5, 130), (1, 1), (3, 64), (7, 47)])
def test_bytes_are_the_formula_and_rows_are_the_whole(codec: Sketch, shape: tuple[int, int]) -> None:
    x = normal(*shape)
    parts = codec.encode(x)
    assert {k: (tuple(v.shape), v.dtype) for k, v in parts.items()} == codec.spec(shape)
    assert codec.nbytes(shape) == sum(t.nbytes for t in parts.values())
    whole = codec.decode(parts, shape, torch.float32)
    assert torch.equal(codec.rows(parts, shape, shape[0] - 1, shape[0], torch.float32), whole[-1:])
    # Every weight is the value of its group's grid that is nearest.
    grid, width = parts["grid"].float(), codec.width(shape[1])
    for j in range(shape[1]):
        gap = (x[:, j : j + 1] - grid[:, j // width]).abs().amin(1)
        assert torch.allclose((x[:, j] - whole[:, j]).abs(), gap, atol=1e-7)
    assert from_meta(codec.meta()) == codec


def test_few_different_values_are_exact_up_to_float16() -> None:
    values = torch.tensor([-1.5, -0.25, 0.0, 0.125, 3.0] * 20)
    x = torch.stack([values, values.flip(0) * 2, torch.full((100,), 0.5)])
    for codec in (Sketch(), Sketch(4, 2)):
        assert torch.equal(codec.decode(codec.encode(x), x.shape, torch.float32), x)
    four = torch.tensor([[1.0, 2.0, -3.0, 0.5] * 6])
    assert torch.equal(Sketch(2).decode(Sketch(2).encode(four), four.shape, torch.float32), four)


def test_error_falls_with_bits_and_groups_and_is_below_a_uniform_grid() -> None:
    x = normal(32, 512)

    def error(codec: Sketch | Int4) -> float:
        return float((codec.decode(codec.encode(x), x.shape, torch.float32) - x).norm() / x.norm())

    assert error(Sketch(2)) > error(Sketch(2, 4)) > error(Sketch(4)) > error(Sketch(4, 4))
    assert error(Sketch()) < error(Int4(group=512))
    # The best 16 levels for a whole normal distribution have a mean squared error of 0.009497 (Max, 1960, table I).
    assert error(Sketch()) < 0.009497**0.5


def test_k_means_is_at_a_fixed_point_and_importance_moves_it() -> None:
    x, ones = normal(4, 300), torch.ones(4, 300)
    grid = cluster(x, ones, 4)
    codes = nearest(x, grid)
    means = torch.stack([torch.stack([x[r][codes[r] == k].mean() for k in range(4)]) for r in range(4)])
    assert (means - grid).abs().max() < 0.02
    importance = torch.ones(300)
    importance[:20] = 1000.0
    plain, weighted = Sketch(2), Sketch(2)
    near = weighted.decode(weighted.encode(x, importance), x.shape, torch.float32)
    far = plain.decode(plain.encode(x), x.shape, torch.float32)
    assert (near - x)[:, :20].norm() < 0.8 * (far - x)[:, :20].norm()


def test_bad_numbers_and_options_are_refused_and_a_layer_multiplies_by_it() -> None:
    x = normal(4, 32)
    for bad in (float("nan"), float("inf"), 1e6):
        wrong = x.clone()
        wrong[2, 3] = bad
        with pytest.raises(SkimpError, match="beyond float16"):
            Sketch().encode(wrong)
    with pytest.raises(SkimpError, match="2 or 4 bits"):
        Sketch(3)
    with pytest.raises(SkimpError, match="decoding"):
        Sketch().decode(Sketch().encode(x), (8, 32), torch.float32)
    layer = CodedLinear(32, 4, Sketch())
    layer.take(x)
    rows = normal(6, 32, seed=1)
    assert torch.equal(layer(rows), torch.nn.functional.linear(rows, layer.weight.dense()))
