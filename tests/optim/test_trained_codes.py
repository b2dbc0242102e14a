"""Q-GaLore on int8 weights: a step is that on the decoded weight, rounded at random; one matrix is dense at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core import coded_trained
from skimp.core.codecs import Int8, integers_rounding
from skimp.core.codecs.integers_rounding import round_into
from skimp.core.coded_linear import CodedLinear
from skimp.core.coded_trained import decoded, stand_ins, train_codes
from skimp.core.errors import NonFiniteError, SkimpError
from skimp.core.memory.tracker import Tracker
from skimp.optim import AdamW, GaLore, Muon, QGaLore, project_backward


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def net(width: int = 24, codec: Any = None, outputs: int = 50) -> nn.Sequential:
    """Coded 24 → 50 → 24; the second is tall where the first is wide."""
    layers = []
    for i, (a, b) in enumerate(((width, outputs), (outputs, width))):
        made = CodedLinear(a, b, codec or Int8(16))
        made.take(normal(b, a, seed=i) / a**0.5)
        layers.append(made)
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    train_codes(model)
    return model


def dense_of(model: nn.Sequential) -> nn.Sequential:
    made = nn.Sequential(
        *(nn.Linear(m.in_features, m.out_features, bias=False) if i != 1 else m for i, m in enumerate(model))
    )
    for i in (0, 2):
        made[i].weight.data.copy_(decoded(model[i]))
    return made


def rule_of(named: Any, **more: Any) -> QGaLore:
    return QGaLore(list(named), **{"lr": 1e-2, "rank": 4, "refresh": 3, "weight_decay": 0.1, "seed": 3, **more})


def loss(model: nn.Module, step: int, width: int = 24) -> Tensor:
    return (model(normal(9, width, seed=100 + step)) - normal(9, width, seed=200 + step)).square().mean()


@pytest.mark.parametrize("rank", [4, 23], ids=["projected", "a rank that saves nothing for it"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_after_a_step_are_the_dense_step_rounded(rank: int, symmetric: bool) -> None:
    """Step by step: the dense rule on what the codes stood for, then `round_into` with the rule's own noise."""
    model = net(codec=Int8(16, symmetric))
    # rank 23 of 24 saves nothing for the coded matrices, which then take AdamW; a large one keeps the rule.
    large = nn.Parameter(normal(400, 400, seed=8)) if rank == 23 else None
    more = [] if large is None else [("large", large)]
    rule = rule_of([*stand_ins(model), *more], rank=rank)
    assert (rule.rank_of(model[0].trained.stand_in) is None) == (rank == 23)
    plain = dense_of(model)
    copy = [] if large is None else [("large", nn.Parameter(large.detach().clone()))]
    twin = rule_of([*plain.named_parameters(), *copy], rank=rank)
    for step in range(5):
        for i in (0, 2):
            plain[i].weight.data.copy_(decoded(model[i]))
        for made, moved in ((model, rule), (plain, twin)):
            moved.zero_grad()
            loss(made, step).backward()
        expected = {}
        held = {i: {k: v.clone() for k, v in model[i].parts().items()} for i in (0, 2)}
        rule.step()
        twin.step()
        for i in (0, 2):
            assert not torch.equal(held[i]["codes"], model[i].parts()["codes"])
            round_into(Int8(16, symmetric), held[i], plain[i].weight.data, 3, f"{i}.weight.codes", stream=step + 1)
            expected[i] = held[i]
            assert all(torch.equal(v, model[i].parts()[k]) for k, v in expected[i].items())
    for (_, a, x), (_, b, y) in zip(rule.named_state(), twin.named_state(), strict=True):
        assert a == b
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


@pytest.mark.parametrize("micro", [1, 3])
def test_compact_gradients_move_the_same_codes(micro: int) -> None:
    """The same steps where the backward hands over factors; sums differ in the last bits, and a draw with them."""
    found = {}
    for compact in (False, True):
        model = net()
        rule = rule_of(stand_ins(model), refresh=50)
        for step in range(4):
            rule.zero_grad()
            if compact:
                with project_backward(model, rule) as layers:
                    assert layers == ["0", "2"]
                    for i in range(micro):
                        (loss(model, micro * step + (i if step else 0)) / micro).backward()
                    assert all(p.grad is None for _, p in stand_ins(model))
                    rule.step()
            else:
                for i in range(micro):
                    (loss(model, micro * step + (i if step else 0)) / micro).backward()
                rule.step()
        found[compact] = [decoded(model[i]) for i in (0, 2)]
        assert model[0].trained.receive is None
        scale = model[0].parts()["scale"].max()
    for a, b in zip(found[False], found[True], strict=True):
        assert ((a - b).abs() <= 1.01 * scale).all()
        assert (a != b).float().mean() < 0.02


def test_training_falls_by_random_rounding_and_stands_still_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate whose moves are a tenth of a step between levels."""

    def losses(nearest: bool) -> list[float]:
        if nearest:

            def put(codec: Any, parts: dict[str, Tensor], x: Tensor, *_: Any, **__: Any) -> None:
                for key, part in codec.encode(x).items():
                    parts[key].copy_(part)

            monkeypatch.setattr(coded_trained, "round_into", put)
        model = net()
        rule = rule_of(stand_ins(model), lr=3e-3, weight_decay=0.0, refresh=50, rank=6)
        found = []
        for _ in range(60):
            rule.zero_grad()
            value = loss(model, 0)
            value.backward()
            rule.step()
            found.append(float(value.detach()))
        return found

    drawn, nearest = losses(False), losses(True)
    assert drawn[-1] < 0.9 * drawn[0]
    assert drawn[0] - drawn[-1] > 3 * abs(nearest[0] - nearest[-1])


def test_an_update_that_breaks_off_leaves_the_codes() -> None:
    model = net()
    rule = rule_of(stand_ins(model))
    p = model[0].trained.stand_in
    held = {k: v.clone() for k, v in model[0].parts().items()}
    with pytest.raises(NonFiniteError, match=r"0\.weight"):
        rule.step_parameter(p, torch.full(p.shape, float("nan")))
    assert all(torch.equal(v, model[0].parts()[k]) for k, v in held.items())
    assert rule.state[p]["step"] == 0


def muon(named: Any) -> Any:
    return Muon([{"params": named, "role": "matrix", "columns": False, "head_dim": 0}])


@pytest.mark.parametrize("make", [AdamW, GaLore, muon])
def test_other_rules_refuse_stand_ins(make: Callable[..., Any]) -> None:
    model = net()
    with pytest.raises(SkimpError, match=r"(?s)'0.weight' in codec 'int8'.*q-galore"):
        make(list(stand_ins(model)))


def test_state_goes_through_torchs_own_format() -> None:
    def steps(rule: Any, model: nn.Module, first: int, last: int) -> None:
        for step in range(first, last):
            rule.zero_grad()
            loss(model, step).backward()
            rule.step()

    whole = net()
    one = rule_of(stand_ins(whole))
    steps(one, whole, 0, 5)
    broken = net()
    two = rule_of(stand_ins(broken))
    steps(two, broken, 0, 2)
    other = net()
    other.load_state_dict(broken.state_dict())
    three = rule_of(stand_ins(other))
    three.load_state_dict(two.state_dict())
    steps(three, other, 2, 5)
    for i in (0, 2):
        assert all(torch.equal(v, other[i].parts()[k]) for k, v in whole[i].parts().items())


def test_weights_take_a_byte_and_their_scales_and_one_matrix_is_dense_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (integers_rounding, coded_trained):
        monkeypatch.setattr(module, "PIECE", 2**14)
    layers = [CodedLinear(512, 512, Int8(128)) for _ in range(6)]
    for i, layer in enumerate(layers):
        layer.take(normal(512, 512, seed=i) / 22)
    model = nn.Sequential(*layers)
    train_codes(model)
    numbers = 6 * 512 * 512
    held = [*model.parameters(), *model.buffers(), *(p for _, p in stand_ins(model))]
    assert sum(t.untyped_storage().nbytes() for t in held) == numbers + 4 * numbers // 128 + 6 * 4
    rule = rule_of(stand_ins(model), rank=16, refresh=50)
    with project_backward(model, rule):
        model(normal(4, 512)).square().mean().backward()
        rule.step()
        model(normal(4, 512, seed=1)).square().mean().backward()
        tracker = Tracker()
        with tracker:
            tracker.hold(held, "weights")
            tracker.reset_peak()
            before = tracker.live
            rule.step()
    one = 4 * 512 * 512
    assert one < tracker.peak.total - before < one + 16 * 4 * 2**14  # a piece at a time beside it
