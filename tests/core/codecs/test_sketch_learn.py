"""Sketches learned with the inputs at hand: errors of outputs, columns nobody uses, matrices without an inverse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skimp.core.codecs import Int4, Sketch
from skimp.core.codecs.sketch_learn import compensated, inverse_factor, learn, output_error
from skimp.core.errors import SkimpError


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(rows: int = 48, columns: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A Gaussian W and second moments of correlated inputs, a few of them ten times as large."""
    mix = numbers(columns, columns, seed=seed + 1) / columns**0.5 + torch.eye(columns, dtype=torch.float64)
    x = numbers(4 * columns, columns, seed=seed + 2) @ mix
    x[:, ::17] *= 10
    return numbers(rows, columns, seed=seed) * 0.02, x.t() @ x / x.shape[0]


def error(codec: Sketch | Int4, weight: Tensor, second: Tensor, power: float | None) -> float:
    before = weight.clone()
    parts = codec.encode(weight) if power is None else learn(codec, weight, second.clone(), power=power)  # type: ignore[arg-type]
    assert torch.equal(weight, before)
    return float(output_error(weight, codec.decode(parts, weight.shape, torch.float64), second))


def test_the_factor_is_that_of_the_inverse() -> None:
    _, second = case()
    upper, dead = inverse_factor(second.clone(), 0.05)
    damped = second + 0.05 * second.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(upper.t() @ upper @ damped, torch.eye(64, dtype=torch.float64), rtol=0, atol=1e-10)
    assert torch.equal(upper, upper.triu())
    assert not dead.any()


def test_codes_column_by_column_are_those_of_the_plain_loop() -> None:
    """Across blocks of 128 columns and groups, in float64: the same codes as one update of all later columns each."""
    weight, second = case(5, 300)
    upper, _ = inverse_factor(second, 0.1)
    grid = numbers(5, 2, 4, seed=9).mul(0.02).sort(-1).values
    codes = torch.zeros(5, 304, dtype=torch.uint8)
    compensated(weight.clone(), grid, upper, 152, codes)
    for i in range(5):
        w = weight[i].clone()
        for j in range(300):
            gaps = (grid[i, j // 152] - w[j]).abs()
            assert int(codes[i, j]) == int(gaps.argmin()), (i, j)
            w[j + 1 :] -= (w[j] - grid[i, j // 152, gaps.argmin()]) / upper[j, j] * upper[j, j + 1 :]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [4, 2])
def test_the_error_of_outputs_is_below_plain_k_means_and_falls_with_groups(bits: int, seed: int) -> None:
    weight, second = case(seed=10 * seed)
    plain = error(Sketch(bits), weight, second, None)
    one, two, four = (error(Sketch(bits, g), weight, second, 4.0) for g in (1, 2, 4))
    assert one < 0.8 * plain
    assert two < one * 1.02
    assert four < two
    if bits == 4:
        assert one < error(Int4(group=64), weight, second, None)


def test_few_values_are_exact_and_unused_columns_keep_theirs() -> None:
    _, second = case()
    values = torch.tensor([-0.5, 0.25, 0.0, 1.0], dtype=torch.float64)
    weight = values[torch.randint(0, 4, (7, 64), generator=torch.Generator().manual_seed(1))]
    for codec in (Sketch(2), Sketch(4, 3)):
        parts = learn(codec, weight, second.clone())
        assert torch.equal(codec.decode(parts, weight.shape, torch.float64), weight)
    second[:, 5] = second[5, :] = 0.0
    weight = numbers(7, 64, seed=3)
    codec = Sketch(4, 2)
    seen = codec.decode(learn(codec, weight, second.clone()), weight.shape, torch.float64)
    assert (seen - weight)[:, 5].abs().max() < 2.0
    assert seen[:, 5].abs().max() > 0.1
    live = [j for j in range(64) if j != 5]
    assert (seen - weight)[:, live].norm() < 0.15 * weight.norm()


def test_moments_of_few_tokens_are_damped_and_broken_ones_refused() -> None:
    weight = numbers(6, 40, seed=0)
    x = numbers(3, 40, seed=1)
    parts = learn(Sketch(4, 2), weight, (x.t() @ x / 3).float())
    assert parts["grid"].isfinite().all()
    with pytest.raises(SkimpError, match="Cholesky"):
        learn(Sketch(), weight, torch.full((40, 40), float("nan")))
    weight[1, 2] = float("nan")
    with pytest.raises(SkimpError, match="beyond float16"):
        learn(Sketch(), weight, (x.t() @ x / 3).float())
    lower = -torch.eye(40) + 0.5 * torch.ones(40, 40)
    with pytest.raises(SkimpError, match="no Cholesky factor"):
        inverse_factor(lower, 1e-6)
