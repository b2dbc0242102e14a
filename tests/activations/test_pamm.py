"""PAMM: products of a matrix whose rows are kept as multiples of a few of them, by its error laws; and the layers that
keep their inputs so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.activations.pamm import PAMM
from skimp.activations.points import compress, count_of, draw_rows, nbytes, sums_of, weight_gradient
from skimp.activations.recompute import Recompute
from skimp.core.errors import ConflictError, EffectError, RecipeError, SkimpError
from skimp.core.position import declared_position
from skimp.recipe import load_recipe


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drawn(rows: int, count: int, stream: int) -> Tensor:
    return draw_rows(rows, count, 0, "x", 0, stream, torch.empty(0))


def dense(points: Any) -> Tensor:
    """The approximated matrix, made for once."""
    return points.factor.unsqueeze(1) * points.generators[points.index.long()]


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_row_a_generator_is_exact(eps: float | None, dtype: torch.dtype) -> None:
    x, dy = numbers(37, 11, dtype=dtype), numbers(37, 5, seed=1, dtype=dtype)
    found = weight_gradient(compress(x, torch.arange(37), eps), dy)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(found, dy.t() @ x, rtol=tolerance, atol=tolerance)
    columns = weight_gradient(compress(x, torch.arange(37), eps), dy, columns=True)
    assert columns.is_contiguous()
    torch.testing.assert_close(columns, found.t(), rtol=tolerance, atol=tolerance)


def test_rows_on_the_generators_lines_are_exact_whatever_their_signs() -> None:
    directions = numbers(4, 9)
    which = torch.arange(41) % 4
    x = directions[which] * numbers(41, 1, seed=2)
    dy = numbers(41, 6, seed=3)
    points = compress(x, torch.tensor([0, 5, 2, 7]).sort().values)
    torch.testing.assert_close(weight_gradient(points, dy), dy.t() @ x, rtol=1e-12, atol=1e-12)
    assert points.weight is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_small_eps_samples_rows_without_bias(dtype: torch.dtype) -> None:
    """Each draw is (b/k) times the sampled rows' own product; the mean over draws goes to the whole product as the root
    of the number of draws does."""
    b, k, draws = 40, 10, 2000
    x, dy = numbers(b, 7, dtype=dtype), numbers(b, 3, seed=1, dtype=dtype)
    eps = 1e-6 if dtype == torch.float32 else 1e-12
    total = torch.zeros(3, 7, dtype=torch.float64)
    for i in range(draws):
        chosen = drawn(b, k, i)
        found = weight_gradient(compress(x, chosen, eps), dy)
        if i < 20:
            tolerance = 1e-10 if dtype == torch.float64 else 1e-4
            torch.testing.assert_close(found, b / k * dy[chosen].t() @ x[chosen], rtol=tolerance, atol=tolerance)
        total += found
    whole = (dy.t() @ x).double()
    # Uniform sampling of k of b without replacement: the variance of an entry is b²/k · (1 − k/b) · S².
    terms = dy.double().unsqueeze(2) * x.double().unsqueeze(1)
    spread = b * b / k * (1 - k / b) * terms.var(0)
    expected = (spread.sum() / draws).sqrt()
    assert float((total / draws - whole).norm()) < 2 * float(expected)


def test_without_eps_it_is_biased_by_what_generators_do_not_span() -> None:
    """64 unstructured Gaussian rows of 8, 16 generators: the relative bias of the mean over draws is 0.37 to 0.49."""
    x, dy = numbers(64, 8), numbers(64, 3, seed=1)
    mean = sum(weight_gradient(compress(x, drawn(64, 16, i)), dy) for i in range(600)) / 600
    whole = dy.t() @ x
    assert 0.3 < float((mean - whole).norm() / whole.norm()) < 0.55


def test_factors_are_least_squares_and_more_generators_never_hurt() -> None:
    x = numbers(50, 6)
    residuals = []
    for k in (3, 8, 20):
        points = compress(x, torch.arange(k))
        residual = (x - dense(points)).norm(dim=1)
        best = torch.stack(
            [(x - (x @ g / (g @ g)).unsqueeze(1) * g).norm(dim=1) for g in x[:k]]
        ).min(0).values  # fmt: skip
        torch.testing.assert_close(residual, best, rtol=1e-7, atol=1e-7)
        assert bool((residual <= x.norm(dim=1) * (1 + 1e-12)).all())
        residuals.append(residual)
    assert bool((residuals[1] <= residuals[0] + 1e-9).all())
    assert bool((residuals[2] <= residuals[1] + 1e-9).all())


@pytest.mark.parametrize("eps", [0.2, 0.5, 0.8])
def test_the_papers_bound_holds(eps: float) -> None:
    """‖O − Õ‖_F² ≤ ‖B‖₂² (eps² ‖A kept‖_F² + ‖A dropped‖_F²), stated for β = 1."""
    for seed in range(20):
        x, dy = numbers(48, 6, seed=seed), numbers(48, 4, seed=100 + seed)
        points = compress(x, drawn(48, 12, seed), eps)
        kept = points.factor != 0
        assert points.weight is not None
        assert float(points.weight) == pytest.approx(48 / int(kept.sum()))
        found = weight_gradient(points, dy) / points.weight
        error = (found - dy.t() @ x).square().sum()
        limit = torch.linalg.matrix_norm(dy, 2) ** 2 * (eps**2 * x[kept].square().sum() + x[~kept].square().sum())
        assert float(error) <= float(limit)


def test_rows_of_zeros_and_rows_that_all_drop_give_nothing() -> None:
    x = numbers(20, 4)
    x[3:9] = 0.0
    points = compress(x, torch.tensor([4, 12, 15]))  # one generator is a row of zeros
    assert bool(torch.isfinite(points.factor).all())
    assert bool((points.factor[3:9] == 0).all())
    alone = compress(numbers(6, 4), torch.tensor([0]), 0.0)
    alone = type(alone)(alone.generators, alone.index, alone.factor, alone.weight)
    assert bool(torch.isfinite(weight_gradient(alone, numbers(6, 3))).all())
    none = compress(torch.cat([torch.zeros(1, 4, dtype=torch.float64), numbers(5, 4)]), torch.tensor([0]), 0.5)
    assert torch.equal(weight_gradient(none, numbers(6, 3))[:, 1:] * 0, torch.zeros(3, 3, dtype=torch.float64))


def test_pieces_of_rows_are_the_whole_and_sums_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = numbers(130, 6, dtype=torch.float32), numbers(130, 4, seed=1, dtype=torch.float32)
    whole = compress(x, torch.arange(0, 130, 13), 0.7)
    monkeypatch.setattr("skimp.activations.points.PIECE", 17)
    cut = compress(x, torch.arange(0, 130, 13), 0.7)
    assert torch.equal(cut.index, whole.index)
    torch.testing.assert_close(cut.factor, whole.factor, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sums_of(cut, dy), sums_of(whole, dy), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 0.5])
def test_bytes_are_the_formulas(dtype: torch.dtype, eps: float | None) -> None:
    x = numbers(300, 16, dtype=dtype)
    for one_of in (1, 7, 64, 1000):
        points = compress(x, drawn(300, count_of(300, one_of), 0), eps)
        found = sum(t.numel() * t.itemsize for t in points.tensors())
        assert found == nbytes(300, 16, one_of, dtype.itemsize, eps is not None)
    # The sheet's example: one of 512 tokens, 16,384 tokens of 2,048 bfloat16 numbers.
    assert nbytes(16384, 2048, 512, 2) == 128 * 1024 + 32 * 1024 + 32 * 1024
    assert 16384 * 2048 * 2 // nbytes(16384, 2048, 512, 2) == 341


def test_draws_are_sets_of_different_rows_and_all_rows_come() -> None:
    seen = torch.zeros(30)
    for i in range(200):
        chosen = drawn(30, 6, i)
        assert len(set(chosen.tolist())) == 6
        seen[chosen] += 1
    assert float(seen.min()) > 20
    assert torch.equal(drawn(30, 6, 3), drawn(30, 6, 3))


class Attention(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, m, bias=bias, dtype=dtype) for m in (8, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tanh(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj)], -1)


STRUCTURE: Any = SimpleNamespace(
    roles={"q": ("q_proj",), "k": ("k_proj",), "v": ("v_proj",)}, blocks=("blocks.0",), family="test"
)


def model(**options: Any) -> nn.Module:
    held = nn.Module()
    held.blocks = nn.ModuleList([Attention(**options)])
    return held


def run(held: nn.Module, x: Tensor, step: int = 0, row: int = 0) -> Tensor:
    with declared_position(step, row):
        y: Tensor = held.blocks[0](x)  # type: ignore[index]
    return y


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_everything_but_weights_gradients_is_exact_and_those_are_the_points(bias: bool, again: bool) -> None:
    plain, coded = model(bias=bias), model(bias=bias)
    pamm = PAMM(coded, STRUCTURE, one_of=5)
    recompute = Recompute(coded, ["blocks.0"]) if again else None
    x, y = (numbers(3, 7, 12).requires_grad_() for _ in range(2))
    expected, found = run(plain, x), run(coded, y)
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    points = compress(x.detach().view(21, 12), draw_rows(21, 5, 0, "blocks.0.qkv.points", 0, 0, x))
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, theirs = (m.blocks[0].get_submodule(name) for m in (coded, plain))
        if bias:
            torch.testing.assert_close(mine.bias.grad, theirs.bias.grad, rtol=1e-12, atol=1e-12)
        out = theirs(x.detach())
        dy = (2 * torch.tanh(out) * (1 - torch.tanh(out) ** 2)).view(21, -1)
        torch.testing.assert_close(mine.weight.grad, weight_gradient(points, dy), rtol=1e-10, atol=1e-10)
        assert not torch.allclose(mine.weight.grad, theirs.weight.grad, rtol=1e-3)
    pamm.assert_effect()
    if recompute is not None:
        recompute.remove()
    pamm.remove()
    assert all("forward" not in vars(m) for m in coded.modules())


def test_one_of_one_is_exact() -> None:
    plain, coded = model(), model()
    PAMM(coded, STRUCTURE, one_of=1)
    x = numbers(3, 7, 12)
    for held in (plain, coded):
        run(held, x).square().sum().backward()
    for a, b in zip(coded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11)


def test_three_layers_keep_their_input_once_and_let_go_of_it() -> None:
    coded = model(dtype=torch.float32)
    pamm = PAMM(coded, STRUCTURE, one_of=10)
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    own = {p.untyped_storage().data_ptr() for p in coded.parameters()}
    x = numbers(3, 20, 12, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(coded, x)
    outputs = 4 * 60 * 16  # of the three tanh
    found = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    assert found == nbytes(60, 12, 10, 4) + outputs == sum(pamm.kept_bytes.values()) + outputs
    assert x.untyped_storage().data_ptr() not in kept


def test_draws_differ_by_step_and_row_and_do_not_touch_torchs_generator() -> None:
    coded = model()
    PAMM(coded, STRUCTURE, one_of=5)
    x, state, found = numbers(3, 7, 12), torch.get_rng_state(), []
    for step, row in ((0, 0), (0, 3), (1, 0), (0, 0)):
        coded.zero_grad()
        run(coded, x, step, row).square().sum().backward()
        found.append(coded.blocks[0].q_proj.weight.grad.clone())  # type: ignore[index, union-attr]
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_refusals_and_effects() -> None:
    coded = model()
    pamm = PAMM(coded, STRUCTURE, one_of=5)
    with pytest.raises(SkimpError, match=r"place in the run was not declared"):
        coded.blocks[0](numbers(3, 7, 12))  # type: ignore[index]
    with torch.no_grad():
        coded.blocks[0](numbers(3, 7, 12))  # type: ignore[index]
    with pytest.raises(EffectError, match=r"k_proj ran as it is"):
        pamm.assert_effect()
    with pytest.raises(ConflictError, match=r"no linear layer for queries"):
        PAMM(nn.Module(), STRUCTURE, one_of=5)
    small = model()
    pamm = PAMM(small, STRUCTURE, one_of=1)
    run(small, numbers(3, 7, 12)).sum().backward()
    with pytest.raises(EffectError, match=r"nothing was saved"):
        pamm.assert_effect()


def test_recipe_keys() -> None:
    values: dict[str, Any] = {"model": "tiny", "data": {"train": "pydoc"}, "output": "runs/x"}
    made = load_recipe({**values, "activations": {"pamm": 512}})
    assert made.activations.pamm is not None
    assert (made.activations.pamm.one_of, made.activations.pamm.eps) == (512, None)
    made = load_recipe({**values, "activations": {"pamm": {"one_of": 64, "eps": 0.5}}})
    assert made.activations.pamm is not None
    assert made.activations.pamm.eps == 0.5
    for wrong in (0, -3, 0.5, "much", {"one_of": 4, "eps": 0.0}):
        with pytest.raises(RecipeError, match=r"activations\.pamm"):
            load_recipe({**values, "activations": {"pamm": wrong}})
    with pytest.raises(RecipeError, match=r"every block is recomputed[\s\S]*exact\.recompute=null"):
        load_recipe({**values, "activations": {"pamm": 64}, "exact": {"recompute": "all"}})
