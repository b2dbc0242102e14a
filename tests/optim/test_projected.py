"""What the projected family owes as one pipeline: identities, bytes, changes of basis, refusals, resume."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skimp.optim.presets as presets
from skimp.core.errors import CheckpointError, EffectError, NonFiniteError, SkimpError
from skimp.core.linalg import exact_basis
from skimp.optim import AdamW, AdamW8bit
from skimp.optim.bases import Identity, Subspace
from skimp.optim.inner import Adam
from skimp.optim.projected import Projected
from skimp.optim.stages import Stages

SHAPES = {"wide": (12, 31), "square": (17, 17), "tall": (40, 13)}
#: Every preset with a rank below the shapes above; periods that a short test passes twice.
PRESETS: dict[str, tuple[type[Projected], dict[str, Any]]] = {
    "galore": (presets.GaLore, {"rank": 4, "refresh": 4}),
    "galore rotate": (presets.GaLore, {"rank": 4, "refresh": 4, "policy": "rotate"}),
    "galore align": (presets.GaLore, {"rank": 4, "refresh": 4, "policy": "align"}),
    "galore bf16 states": (presets.GaLore, {"rank": 4, "refresh": 4, "states": "bf16"}),
    "galore released": (presets.GaLore, {"rank": 4, "refresh": 4, "as_released": True}),
    "galore8bit": (presets.GaLore8bit, {"rank": 4, "refresh": 4}),
    "galore2": (presets.GaLore2, {"rank": 4, "refresh": 4}),
    "q-galore": (presets.QGaLore, {"rank": 4, "refresh": 4}),
    "osd": (presets.OnlineSubspaceDescent, {"rank": 3}),
    "natural": (presets.NaturalGaLore, {"rank": 4, "refresh": 4, "history": 3}),
    "natural one side": (presets.NaturalGaLore, {"rank": 2, "refresh": 4, "history": 3, "sides": "one"}),
    "grass": (presets.Grass, {"rank": 4, "refresh": 4}),
    "grass drawn": (presets.Grass, {"rank": 4, "refresh": 4, "rows": "norm", "replace": True}),
    "apollo": (presets.Apollo, {"rank": 4, "refresh": 4}),
    "apollo-mini": (presets.ApolloMini, {"refresh": 4}),
    "fira": (presets.Fira, {"rank": 4, "refresh": 4}),
    "ldadam": (presets.LDAdam, {"rank": 2}),
    "frugal": (presets.Frugal, {"rank": 4, "refresh": 4}),
}
EVERY = pytest.mark.parametrize("name", PRESETS)


class Whole(Projected):
    """The pipeline with the identity for a projector."""

    rule = "whole"


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    made = {
        n: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for n, s in SHAPES.items()
    }
    return made | {
        "norm": nn.Parameter(torch.ones(9, dtype=dtype)),
        "embed": nn.Parameter(torch.ones(20, 6, dtype=dtype)),
    }


def made(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> tuple[dict[str, nn.Parameter], Projected]:
    cls, options = PRESETS[name]
    model = weights(dtype)
    return model, cls(list(model.items()), lr=1e-2, weight_decay=0.1, **options | more)


def gradient(p: Tensor, name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    return torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def steps(model: dict[str, nn.Parameter], rule: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for name, p in model.items():
            p.grad = gradient(p, name, step)
        rule.step()


def equal(one: dict[str, nn.Parameter], other: dict[str, nn.Parameter]) -> bool:
    return all(torch.equal(one[n], other[n]) for n in one)


def whole(model: dict[str, nn.Parameter], states: Any = "fp32") -> Projected:
    stages = Stages(Identity(), Adam(states), states=states)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return Whole(list(model.items()), stages, **options, rank=4, refresh=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_identity_projector_is_adamw_bit_for_bit(dtype: torch.dtype) -> None:
    one, two = weights(dtype), weights(dtype)
    steps(one, whole(one), 0, 11)
    steps(two, AdamW(list(two.items()), lr=1e-2, weight_decay=0.1), 0, 11)
    assert equal(one, two)


def test_the_identity_projector_on_8_bit_states_is_adamw8bit_but_for_the_place_of_a_rounding() -> None:
    """The kernel fuses decay and move; moments are the same to the bit, weights to an ulp."""
    one, two = ({"w": nn.Parameter(torch.ones(61, 70))} for _ in range(2))
    rule, other = whole(one, "int8"), AdamW8bit(list(two.items()), lr=1e-2, weight_decay=0.1)
    steps(one, rule, 0, 5)
    steps(two, other, 0, 5)
    for key in ("m", "m_absmax", "v", "v_absmax"):
        assert torch.equal(rule.state[one["w"]][key], other.state[two["w"]][key])
    torch.testing.assert_close(one["w"], two["w"], rtol=3e-7, atol=0)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_twice_off_the_period_is_bit_equal(name: str, dtype: torch.dtype) -> None:
    straight = made(name, dtype)
    steps(*straight, 0, 11)
    model, rule = made(name, dtype)
    for first, last in ((0, 3), (3, 7), (7, 11)):
        steps(model, rule, first, last)
        file = io.BytesIO()
        torch.save([dict(model), rule.state_dict()], file)
        file.seek(0)
        saved, state = torch.load(file, weights_only=True)
        model, rule = made(name, dtype)
        with torch.no_grad():
            for n, p in model.items():
                p.copy_(saved[n])
        rule.load_state_dict(state)
    assert equal(straight[0], model)
    for (n, k, value), (m, j, other) in zip(straight[1].named_state(), rule.named_state(), strict=True):
        assert (n, k) == (m, j)
        assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, (n, k)


@EVERY
def test_one_parameter_at_a_time_is_the_same_step(name: str) -> None:
    one, two = made(name), made(name)
    steps(*one, 0, 6)
    for step in range(6):
        for key, p in reversed(list(two[0].items())):
            two[1].step_parameter(p, gradient(p, key, step))
    assert equal(one[0], two[0])


#: Numbers of state of an a × b matrix at rank r, in float32 unless said.
FORMULAS: dict[str, Callable[[int, int, int], int]] = {
    "galore": lambda a, b, r: 4 * (a * r + 2 * b * r),
    "galore2": lambda a, b, r: 4 * (a * r + 2 * b * r),
    "galore bf16 states": lambda a, b, r: 4 * a * r + 2 * 2 * b * r,
    "q-galore": lambda a, b, r: -(-a * r // 256) * (128 + 8) + 4 * 2 * b * r + 20,  # R of under 4,096 is not coded
    "osd": lambda a, b, r: 4 * (3 * a * r + 2 * b * r),
    "natural": lambda a, b, r: 4 * ((a + b) * r + (2 + 3) * r * r) + 8 * 9,
    "natural one side": lambda a, b, r: 4 * (a * r + (2 + 3) * b * r) + 8 * 9,
    "grass": lambda a, b, r: 4 * (2 * b * r + 2 * r),
    "apollo": lambda a, b, r: 4 * (2 * b * r + 1),
    "apollo-mini": lambda a, b, r: 4 * (2 * b + 1),
    "fira": lambda a, b, r: 4 * (a * r + 2 * b * r + 1),
    "ldadam": lambda a, b, r: 4 * (a * r + 2 * b * r + a * b),
    "frugal": lambda a, b, r: 4 * (2 * b * r + 2 * r),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_state_bytes_are_the_formula_and_what_is_allocated(name: str) -> None:
    model, rule = made(name)
    rule.init_states()
    rows = {row.parameter: row for row in rule.table()}
    for key, shape in SHAPES.items():
        p = model[key]
        held = sum(t.untyped_storage().nbytes() for t in rule.state[p].values() if isinstance(t, Tensor))
        rank = rule.rank_of(p)
        assert rank is not None
        assert held == rows[key].state_bytes == rule.bytes_of(p) == FORMULAS[name](min(shape), max(shape), rank)
        assert rows[key].rule == f"{rule.rule} (rank {rank})"
    assert rows["embed"].rule.startswith("adamw")
    assert rows["embed"].state_bytes == 8 * 120


def test_8_bit_moments_take_a_byte_and_a_block_maximum() -> None:
    rule = presets.GaLore8bit([("w", nn.Parameter(torch.zeros(70, 130)))], rank=32)
    assert rule.table()[0].state_bytes == 4 * 70 * 32 + 2 * (130 * 32 + 4 * -(-130 * 32 // 256))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("svd", ["exact", "random"])
def test_a_new_basis_gives_the_best_approximation_of_its_rank(shape: tuple[int, int], svd: Any) -> None:
    """P·Pᵀ·G is the truncated SVD, whichever side is projected; P is orthonormal."""
    p = nn.Parameter(torch.zeros(shape))
    rule = presets.GaLore([("w", p)], rank=2, svd=svd)
    left, right = gradient(p, "w", 0)[:, :2], gradient(p, "w", 1)[:2]
    p.grad = left @ right + 1e-3 * gradient(p, "w", 2)
    rule.step()
    basis = rule.state[p]["P"]
    turned = shape[0] >= shape[1]
    found = p.grad @ basis @ basis.t() if turned else basis @ (basis.t() @ p.grad)
    u, s, v = torch.linalg.svd(p.grad, full_matrices=False)
    torch.testing.assert_close(found, (u[:, :2] * s[:2]) @ v[:2], rtol=0, atol=1e-4 if svd == "random" else 1e-5)
    assert float((basis.t() @ basis - torch.eye(2)).abs().max()) < 1e-5


def test_the_first_move_has_the_norm_of_its_signs() -> None:
    """eps → 0: −lr·α·P·sign(Pᵀ·G), of Frobenius norm lr·α·√(r·b)."""
    p = nn.Parameter(torch.zeros(12, 31))
    rule = presets.GaLore([("w", p)], rank=5, lr=0.1, eps=1e-30)
    p.grad = gradient(p, "w", 0)
    rule.step()
    assert float(p.detach().norm()) == pytest.approx(0.1 * 0.25 * (5 * 31) ** 0.5, rel=1e-4)
    basis = exact_basis(p.grad, 5)
    torch.testing.assert_close(p.detach(), -0.025 * basis @ torch.sign(basis.t() @ p.grad), rtol=0, atol=1e-4)


def galore_by_hand(w: Tensor, grads: list[Tensor], rank: int, period: int, released: bool) -> Tensor:
    """The rule as its paper (eps and decay as in torch) or its released code has it, in float64, wide matrices."""
    lr, alpha, b1, b2, eps, wd = 1e-2, 0.25, 0.9, 0.999, 1e-6, 0.1
    m = v = torch.zeros(rank, w.shape[1], dtype=w.dtype)
    for t, g in enumerate(grads, 1):
        if (t - 1) % period == 0:
            basis = exact_basis(g, rank)
        r = basis.t() @ g
        m, v = b1 * m + (1 - b1) * r, b2 * v + (1 - b2) * r * r
        if released:
            w = w - lr * (1 - b2**t) ** 0.5 / (1 - b1**t) * alpha * basis @ (m / (v.sqrt() + eps))
            w = w - lr * wd * w
        else:
            n = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
            w = (1 - lr * wd) * w - lr * alpha * basis @ n
    return w


@pytest.mark.parametrize("released", [False, True])
def test_galore_by_hand_over_two_changes_of_basis(released: bool) -> None:
    p = nn.Parameter(gradient(torch.zeros(12, 31, dtype=torch.float64), "w", 77))
    grads = [gradient(p, "w", t) for t in range(11)]
    expected = galore_by_hand(p.detach().clone(), grads, 4, 5, released)
    rule = presets.GaLore(
        [("w", p)], lr=1e-2, eps=1e-6, weight_decay=0.1, rank=4, refresh=5, stagger=False, as_released=released
    )
    for g in grads:
        rule.step_parameter(p, g)
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


def test_gradients_of_the_rank_are_not_changed_by_the_projection() -> None:
    """G = A·Bᵀ: P·Pᵀ·G = G, and the weights are Adam's run on Uᵀ·G and lifted, not Adam's on G."""
    p = nn.Parameter(torch.zeros(12, 31, dtype=torch.float64))
    a, b = gradient(p, "a", 0)[:, :4], gradient(p, "b", 1)[:4]
    rule = presets.GaLore([("w", p)], rank=4, scale=1.0, refresh=100)
    small = nn.Parameter(torch.zeros(4, 31, dtype=torch.float64))
    adam = AdamW([("s", small)], lr=1e-2, weight_decay=0.0)
    basis = exact_basis(a @ b, 4)
    for step in range(6):
        g = a @ (b * (1 + 0.3 * step))
        torch.testing.assert_close(basis @ (basis.t() @ g), g)
        rule.step_parameter(p, g)
        adam.step_parameter(small, basis.t() @ g)
    torch.testing.assert_close(p.detach(), basis @ small.detach(), rtol=0, atol=1e-12)


def test_least_squares_needs_more_than_one_basis() -> None:
    """½‖W − W*‖²: a frozen basis stalls at half the squares of the singular values it does not hold."""
    target = torch.randn(24, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left = 0.5 * float(torch.linalg.svdvals(target)[6:].square().sum())

    def after(refresh: int) -> float:
        p = nn.Parameter(torch.zeros_like(target))
        rule = presets.GaLore([("w", p)], lr=0.01, scale=1.0, rank=6, refresh=refresh)
        for _ in range(1500):
            rule.step_parameter(p, p.detach() - target)
        return 0.5 * float((p.detach() - target).square().sum())

    assert after(10**6) == pytest.approx(left, rel=1e-3)
    assert after(50) < 1e-2 * left


@EVERY
def test_a_gradient_of_zeros_at_a_change_of_basis_keeps_the_old_one(name: str) -> None:
    model, rule = made(name)
    p = model["wide"]
    before = p.detach().clone()
    rule.step_parameter(p, torch.zeros_like(p))  # the first step: there is no basis yet
    torch.testing.assert_close(p.detach(), before * (1 - 1e-2 * 0.1))
    rule.step_parameter(p, gradient(p, "w", 0))
    assert rule.state[p]["refreshed"] == 2
    basis = {k: v.clone() for k, v in rule.state[p].items() if k.startswith(("P", "chosen"))}
    for _ in range(9):
        rule.step_parameter(p, torch.zeros_like(p))
    assert bool(p.isfinite().all())
    if name != "ldadam":  # what was left out of the first gradient is there to be fitted
        assert rule.state[p]["refreshed"] == 2
        assert all(torch.equal(rule.state[p][k], v) for k, v in basis.items())


@EVERY
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_by_name_before_anything_changes(name: str, bad: float) -> None:
    model, rule = made(name)
    other, twin = made(name)
    p, q = model["tall"], other["tall"]
    g = gradient(p, "w", 0)
    g[3, 4] = bad
    with pytest.raises(NonFiniteError, match=r"'tall'[\s\S]*step 1"):
        rule.step_parameter(p, g)
    for step in range(3):
        rule.step_parameter(p, gradient(p, "w", step))
        twin.step_parameter(q, gradient(q, "w", step))
    assert torch.equal(p, q)


def test_changes_of_basis_are_spread_over_the_period() -> None:
    model = {f"w{i}": nn.Parameter(torch.zeros(8, 20)) for i in range(6)}
    rule = presets.GaLore2(list(model.items()), rank=2, refresh=12)
    seen: list[int] = []
    for step in range(60):
        steps(model, rule, step, step + 1)
        seen.append(sum(rule.state[p]["refreshed"] == step + 1 for p in model.values()))
    assert seen[0] == 6  # there is none before the first step
    assert max(seen[1:]) == 1
    assert sum(seen[12:]) == 6 * 4


@pytest.mark.parametrize("policy", ["keep", "align", "rotate", "reset"])
def test_policies_of_the_moments(policy: Any) -> None:
    """A basis that turns within its own span: carried over or aligned, first moments stay the same vectors."""
    p = nn.Parameter(torch.zeros(12, 31, dtype=torch.float64))
    a, b = gradient(p, "a", 0)[:, :3], gradient(p, "b", 1)[:3]
    rule = presets.GaLore([("w", p)], rank=3, refresh=2, stagger=False, policy=policy)
    weighted = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    rule.step_parameter(p, a @ b)
    rule.step_parameter(p, a @ b)
    state = rule.state[p]
    before = state["P"] @ state["m"]
    g = (a * weighted) @ b.roll(1, 0)
    rule.step_parameter(p, g)
    held = (state["P"] @ state["m"] - 0.1 * g) / 0.9
    expected = {"rotate": before, "align": before, "reset": torch.zeros_like(before)}
    if policy == "keep":
        assert float((held - before).norm()) > 0.1 * float(before.norm())
        return
    assert state["since"] == (1 if policy == "reset" else 3)
    torch.testing.assert_close(held, expected[policy], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["galore", "grass", "fira"])
def test_the_rate_rises_again_after_a_change_of_basis(name: str) -> None:
    """rewarm 2 of a period of 4: bases at steps 1, 5, 9, so steps 5 and 6, 9 and 10 at 1/3 and 2/3; to the bit."""
    cls, options = PRESETS[name]
    ends = []
    for rewarm in (2, 0):
        model = {n: p for n, p in weights(torch.float64).items() if n in SHAPES}
        rule = cls(list(model.items()), lr=1e-2, weight_decay=0.1, stagger=False, rewarm=rewarm, **options)
        for step in range(10):
            factor = {4: 1 / 3, 5: 2 / 3, 8: 1 / 3, 9: 2 / 3}.get(step, 1.0)
            rule.param_groups[0]["lr"] = 1e-2 * (1.0 if rewarm else factor)
            for n, p in model.items():
                p.grad = gradient(p, n, step)
            rule.step()
        ends.append([p.detach().clone() for p in model.values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_refusals() -> None:
    with pytest.raises(SkimpError, match=r"rewarm 4[\s\S]*never be full again[\s\S]*rewarm 3"):
        made("galore", rewarm=4)
    square = ("w", nn.Parameter(torch.zeros(30, 30)))
    with pytest.raises(
        SkimpError, match=r"rank 20[\s\S]*7,200 bytes of state for \(30, 30\), 7,200 unprojected[\s\S]*rank 19 at most"
    ):
        presets.GaLore([square], rank=20)
    assert presets.GaLore([square], rank=19).rank_of(square[1]) == 19
    with pytest.raises(SkimpError, match=r"rank 31[\s\S]*30 directions"):
        presets.Apollo([square], rank=31)
    with pytest.raises(SkimpError, match=r"none among 1 parameters, of shapes \(900,\)[\s\S]*loses their shape"):
        presets.GaLore([("flat", nn.Parameter(torch.zeros(900)))], rank=4)
    with pytest.raises(SkimpError, match="a matrix between hidden states"):
        presets.GaLore([("experts", nn.Parameter(torch.zeros(3, 9, 9))), ("embed_tokens", square[1])], rank=4)
    with pytest.raises(SkimpError, match="refresh 0"):
        presets.GaLore([square], refresh=0)
    with pytest.raises(SkimpError, match="rotate with int8"):
        presets.GaLore8bit([square], policy="rotate")
    with pytest.raises(SkimpError, match="float16"):
        presets.GaLore([("h", nn.Parameter(torch.zeros(9, 9, dtype=torch.float16)))], rank=2)
    with pytest.raises(TypeError, match="rnk"):
        presets.GaLore([square], rnk=2)


def test_a_matrix_of_which_nothing_is_saved_stays_whole_and_the_table_says_so() -> None:
    model = {"big": nn.Parameter(torch.zeros(40, 40)), "small": nn.Parameter(torch.zeros(12, 40))}
    rows = {row.parameter: row for row in presets.GaLore(list(model.items()), rank=11).table()}
    assert rows["big"].rule == "galore (rank 11)"
    assert rows["small"].rule == "adamw (rank 11 saves nothing here)"


def test_another_rank_is_refused_on_resume() -> None:
    model, rule = made("galore")
    steps(model, rule, 0, 2)
    other = made("galore", rank=5)[1]
    with pytest.raises(CheckpointError, match=r"'wide\.P' as torch\.float32 \(12, 5\)"):
        other.load_named_state({f"{n}.{k}": v for n, k, v in rule.named_state()})


def test_groups_have_ranks_of_their_own() -> None:
    model = weights()
    groups = [{"params": [("tall", model["tall"])], "rank": 2}, {"params": [("wide", model["wide"])]}]
    rule = presets.GaLore(groups, rank=5)
    assert (rule.rank_of(model["tall"]), rule.rank_of(model["wide"])) == (2, 5)


@EVERY
def test_effect_and_a_projection_that_never_happened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rule = made(name)
    before = {n: p.detach().clone() for n, p in model.items()}
    steps(model, rule, 0, 1)
    rule.assert_effect(before, {n: p.detach() for n, p in model.items()})
    model, rule = made(name)
    monkeypatch.setattr(Projected, "_refresh", lambda self, g, state, place: None)
    steps(model, rule, 0, 1)
    with pytest.raises(EffectError, match="has a basis"):
        rule.assert_effect(before, {n: p.detach() for n, p in model.items()})


def test_a_step_allocates_no_second_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between changes of basis: R, the move and their kin, never an m × n tensor."""
    from skimp.core.memory.tracker import Tracker

    p = nn.Parameter(torch.zeros(96, 160))
    rule = presets.GaLore([("w", p)], rank=4, refresh=100)
    g = gradient(p, "w", 0)
    rule.step_parameter(p, g)
    with Tracker() as tracker:
        tracker.hold([p, g, *(v for v in rule.state[p].values() if isinstance(v, Tensor))], "optimizer")
        tracker.reset_peak()
        start = tracker.live
        rule.step_parameter(p, g)
    assert tracker.peak.total - start < 4 * (4 * 4 * 160) < p.numel() * 4
    assert Subspace.saves


@pytest.mark.parametrize("name", ["galore", "galore8bit", "galore2", "q-galore", "natural", "grass"])
def test_micro_batches_add_up_to_the_step_of_their_sum(name: str) -> None:
    """The projection is linear: between changes of basis the parts give what the whole gives, to rounding."""
    one, two = made(name, torch.float32, refresh=100), made(name, torch.float32, refresh=100)
    assert two[1].adds_up
    for step in range(4):
        for key, (p, q) in {k: (one[0][k], two[0][k]) for k in one[0]}.items():
            parts = [gradient(p, key, 10 * step + i) for i in range(3)] if step else [gradient(p, key, 0)]
            one[1].step_parameter(p, torch.stack(parts).sum(0))
            for part in parts:
                two[1].add_gradient(q, part)
            two[1].step_added(q)
    for key, p in one[0].items():
        torch.testing.assert_close(two[0][key], p, rtol=1e-4, atol=2e-5 if name == "natural" else 2e-6)
    assert not two[1]._added
    assert two[1].state[two[0]["wide"]]["step"] == 4


def test_what_is_added_up_is_small_and_can_be_dropped() -> None:
    model, rule = made("galore")
    p = model["wide"]
    assert rule.add_gradient(p, gradient(p, "w", 0)).shape == (4, 31)
    held = rule.add_gradient(p, gradient(p, "w", 1))
    torch.testing.assert_close(held, rule.state[p]["P"].t() @ (gradient(p, "w", 0) + gradient(p, "w", 1)))
    rule.drop_added()
    assert rule.state[p]["step"] == 0
    assert rule.state[p]["refreshed"] == 1
    bad = gradient(p, "w", 2)
    bad[0, 0] = float("nan")
    other = made("galore")[1]
    with pytest.raises(NonFiniteError, match="'wide'"):
        other.add_gradient(next(iter(other.parameters())), bad)
    assert next(iter(other.state.values()))["step"] == 0


def test_a_first_basis_that_waits_for_the_second_gradient() -> None:
    """Once: also where the moments, and the steps with them, begin anew before it; and not after a load."""
    first, second = torch.zeros(12, 40), torch.randn(12, 40, generator=torch.Generator().manual_seed(1))

    def made() -> tuple[torch.nn.Parameter, Any]:
        p = torch.nn.Parameter(torch.ones(12, 40))
        rule = presets.GaLore([("w", p)], lr=1e-2, rank=3)
        rule.still = frozenset({"w"})
        return p, rule

    p, rule = made()
    rule.step_parameter(p, first)
    assert (rule.state[p]["refreshed"], rule.state[p]["step"]) == (0, 1)
    assert torch.equal(p.detach(), torch.ones(12, 40))
    saved = {key: torch.clone(v) if isinstance(v, Tensor) else v for key, v in rule.state[p].items()}
    rule.step_parameter(p, second)
    assert rule.state[p]["refreshed"] == 2

    p, rule = made()
    rule.step_parameter(p, first)
    rule.reset_moments()
    rule.step_parameter(p, second)
    assert (rule.state[p]["refreshed"], rule.state[p]["step"]) == (1, 1)

    p, rule = made()
    rule.load_named_state({f"w.{key}": value for key, value in saved.items()})
    rule.reset_moments()
    rule.step_parameter(p, second)
    assert rule.state[p]["refreshed"] == 1
