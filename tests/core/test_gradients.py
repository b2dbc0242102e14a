"""Delivery of final gradients: summed, clipped once by the global norm, finite, and each parameter moved
once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core.batch import Batch
from skimp.core.errors import ConflictError, NonFiniteError
from skimp.core.gradients import AfterBackward, Delivery, InBackward
from skimp.core.memory.tracker import Tracker
from skimp.data.synthetic import synthetic_batch
from skimp.steps.first_order import FirstOrder


class Keeper:
    """An update rule that subtracts, and remembers what it was given."""

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr
        self.given: list[tuple[Tensor, Tensor]] = []

    def step_parameter(self, parameter: Tensor, grad: Tensor | None = None) -> None:
        assert grad is not None
        self.given.append((parameter, grad.clone()))
        parameter.sub_(grad, alpha=self.lr)


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Embedding(19, 6), nn.Linear(6, 11), nn.Tanh(), nn.LayerNorm(11), nn.Linear(11, 19, bias=False)
    ).to(dtype)


def loss_of(net: nn.Module) -> Callable[[Batch, int], Tensor]:
    def loss(batch: Batch, normaliser: int) -> Tensor:
        logits = net(batch.ids).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / normaliser

    return loss


def made(kind: type[Delivery], clip: float | None, dtype: torch.dtype = torch.float64) -> Any:
    net, rule = model(dtype), Keeper()
    delivery = kind(net.named_parameters(), rule, clip)
    return net, rule, delivery, FirstOrder(loss_of(net), delivery)


def unequal() -> Batch:
    """Four rows that train 4, 8, 16 and 30 tokens (B01)."""
    batch = synthetic_batch(31, 4, 19, seed=2)
    labels = batch.labels.clone()
    for row, trained in enumerate((4, 8, 16, 30)):
        labels[row, trained:] = -100
    return Batch(batch.ids, labels, batch.positions, batch.documents, 58)


def by_name(net: nn.Module, rule: Keeper) -> dict[str, Tensor]:
    names = {id(p): n for n, p in net.named_parameters()}
    assert len(rule.given) == len(names) == len({id(p) for p, _ in rule.given})
    return {names[id(p)]: g for p, g in rule.given}


@pytest.mark.parametrize("micro_rows", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 1e-2])
def test_accumulated_and_clipped_once_equals_one_batch(micro_rows: int, clip: float | None) -> None:
    """B01 and B05: rows of 4 to 30 tokens in micro-batches, against plain torch on all of them at once."""
    net = model()
    batch = unequal()
    loss = loss_of(net)(batch, batch.trained)
    loss.backward()
    total = torch.nn.utils.clip_grad_norm_(net.parameters(), math.inf if clip is None else clip)
    expected = {n: p.grad for n, p in net.named_parameters()}
    net, rule, _, step = made(AfterBackward, clip)
    result = step.step(batch.split(micro_rows))
    assert result.loss == pytest.approx(loss.item(), rel=1e-13)
    assert result.grad_norm == pytest.approx(total.item(), rel=1e-12)
    assert result.trained == 58
    for name, grad in by_name(net, rule).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-14)


def test_a_short_last_window_uses_its_own_tokens() -> None:
    """B02: two rows after a step of four divide by the tokens of two rows."""
    net, rule, _, step = made(AfterBackward, None)
    batch = unequal()
    step.step(batch.split(1))
    rule.given.clear()
    state = {n: p.detach().clone() for n, p in net.named_parameters()}
    result = step.step(batch.take(0, 2).split(1))
    other = model()
    other.load_state_dict(state)
    loss = loss_of(other)(batch.take(0, 2), 4 + 8)
    loss.backward()
    assert result.trained == 12
    assert result.loss == pytest.approx(loss.item(), rel=1e-13)
    expected = {n: p.grad for n, p in other.named_parameters()}
    for name, grad in by_name(net, rule).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("clip", [None, 1e-2, 1e6])
def test_in_backward_gives_the_rule_the_held_gradients(clip: float | None) -> None:
    """B06: two passes clip as held gradients are clipped; both come in float64 to the last bit."""
    batch = unequal()
    net, rule, delivery, step = made(InBackward, clip)
    held_net, held_rule, _, held_step = made(AfterBackward, clip)
    for _ in range(2):
        result, held = step.step([batch]), held_step.step([batch])
        assert (result.loss, result.grad_norm, result.clip_scale) == (
            held.loss,
            held.grad_norm,
            held.clip_scale,
        )
        found, expected = by_name(net, rule), by_name(held_net, held_rule)
        assert all(torch.equal(found[n], expected[n]) for n in expected)
        rule.given.clear()
        held_rule.given.clear()
    assert delivery.passes == (1 if clip is None else 2)
    assert step.forwards == 2 * delivery.passes
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), held_net.parameters(), strict=True))
    assert result.grad_norm > 0.0  # B33: the norm is recorded before the gradient is freed


def test_in_backward_holds_one_gradient_at_a_time() -> None:
    batch = unequal()
    largest = {}
    for kind in (AfterBackward, InBackward):
        net, _, _, step = made(kind, None)
        seen: list[int] = []
        hooks = [
            p.register_post_accumulate_grad_hook(
                lambda _, net=net, seen=seen: seen.append(sum(p.grad is not None for p in net.parameters()))
            )
            for p in net.parameters()
        ]
        step.step([batch])
        largest[kind] = max(seen)
        for hook in hooks:
            hook.remove()
    assert largest == {AfterBackward: 6, InBackward: 0}


def test_more_than_one_micro_batch_in_backward_is_refused_by_name() -> None:
    _, _, _, step = made(InBackward, None)
    with pytest.raises(ConflictError, match=r"second gradient for .*weight in optimizer step 1") as caught:
        step.step(unequal().split(2))
    assert "in_backward=false" in caught.value.message()


def test_a_gradient_that_is_not_finite_is_named_and_nothing_has_moved() -> None:
    net, rule, _, step = made(AfterBackward, 1.0)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    net[1].weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(NonFiniteError, match=r"gradient of 1\.weight is nan"):
        step.step([unequal()])
    assert not rule.given
    assert all(torch.equal(before[n], p) for n, p in net.named_parameters())


@pytest.mark.parametrize("kind", [AfterBackward, InBackward])
def test_a_gradient_that_is_not_finite_is_named_in_both_deliveries(kind: type[Delivery]) -> None:
    net, rule, delivery, step = made(kind, 1.0)
    delivery.step_index = 7
    net[3].bias.register_hook(lambda g: g + float("inf"))
    with pytest.raises(NonFiniteError, match=r"optimizer step 8") as caught:
        step.step([unequal()])
    assert "3.bias" in caught.value.message()
    assert not rule.given  # the norm pass moves nothing


def test_factor_is_torchs_and_never_above_one() -> None:
    _, _, delivery, _ = made(AfterBackward, 0.5)
    assert delivery._factor(2.0) == 0.5 / (2.0 + 1e-6)
    assert delivery._factor(0.1) == 1.0
    assert delivery._factor(0.0) == 1.0
    _, _, unclipped, _ = made(AfterBackward, None)
    assert unclipped._factor(1e9) == 1.0


def test_norm_of_half_precision_gradients_is_summed_in_float32() -> None:
    """A sum of 300,000 equal squares in bfloat16 would stop at 256 of them."""
    net = nn.Linear(600, 500, bias=False, dtype=torch.bfloat16)
    rule = Keeper(0.0)
    delivery = AfterBackward(net.named_parameters(), rule, None)
    net.weight.grad = torch.full_like(net.weight, 0.01)
    value = float(torch.tensor(0.01, dtype=torch.bfloat16))
    assert delivery.end(0).norm == pytest.approx(value * math.sqrt(300_000), rel=1e-3)


def test_a_sink_is_zeroed_once_a_step_counted_in_the_norm_and_freed() -> None:
    """A buffer that the head fills instead of autograd: same norm, same clip, one buffer, gone after the
    step."""
    for kind in (AfterBackward, InBackward):
        net = nn.Linear(3, 4, bias=False)
        rule = Keeper()
        delivery = kind(net.named_parameters(), rule, 1.0, ["weight"])
        for _ in range(2):
            for index in range(delivery.passes):
                delivery.begin(index)
                buffer = delivery.sink("weight")
                assert buffer is delivery.sink("weight")
                assert buffer is not None
                assert not buffer.any()
                buffer.add_(2.0)
                delivered = delivery.end(index)
            assert delivered is not None
            assert delivered.norm == pytest.approx(math.sqrt(12 * 4.0))
            assert delivery.sinks == {"weight": None}
        assert len(rule.given) == 2
        assert rule.given[0][1].norm().item() == pytest.approx(1.0, rel=1e-5)
        assert delivery.sink("bias") is None


def test_a_step_leaves_no_gradient_and_nothing_else_behind() -> None:
    for kind in (AfterBackward, InBackward):
        net, rule, _, step = made(kind, 1.0)
        rule.step_parameter = lambda p, grad=None: None
        batch = unequal()
        with Tracker() as tracker:
            tracker.hold([*net.parameters(), batch.ids, batch.labels], "weights")
            rest = tracker.live
            step.step([batch])
            assert tracker.live == rest
        assert all(p.grad is None for p in net.parameters())


def test_close_takes_the_hooks_away() -> None:
    net, _, delivery, _ = made(InBackward, None)
    delivery.close()
    loss_of(net)(unequal(), 58).backward()
    assert all(p.grad is not None for p in net.parameters())


class Adder(Keeper):
    """A rule that adds up what it is given."""

    adds_up = True

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[Tensor, Tensor] = {}

    def add_gradient(self, parameter: Tensor, grad: Tensor) -> Tensor:
        self.sums[parameter] = self.sums[parameter].add_(grad) if parameter in self.sums else grad.clone()
        return self.sums[parameter]

    def step_added(self, parameter: Tensor) -> None:
        self.step_parameter(parameter, self.sums.pop(parameter))

    def drop_added(self) -> None:
        self.sums.clear()


class Two(nn.Module):
    """Its second layer is for batches with token 0 in front only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.head, self.more = nn.Embedding(19, 6), nn.Linear(6, 19), nn.Linear(6, 6)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        out: Tensor = self.head(x + self.more(x) if int(ids[0, 0]) == 0 else x)
        return out


@pytest.mark.parametrize("touched", [(0, 1, 2), (0,), (1,), (0, 2)])
def test_a_rule_that_adds_up_moves_what_only_some_micro_batches_touch(touched: tuple[int, ...]) -> None:
    """However many there are: as many as are given, not as many as a recipe says. Nothing is left to the next step."""
    rows = unequal()
    rows.ids[:, 0] = 7
    for row in touched:
        rows.ids[row, 0] = 0
    nets = []
    for kind, rule in ((InBackward, Adder()), (AfterBackward, Keeper())):
        net = Two()
        delivery = kind(net.named_parameters(), rule, None)
        step = FirstOrder(loss_of(net), delivery)
        norms = [step.step([rows.take(i, i + 1) for i in range(count)]).grad_norm for count in (3, 4)]
        nets.append((net, norms))
        assert len(rule.given) == 2 * len(list(net.parameters()))
        assert not getattr(rule, "sums", None)
    assert nets[0][1] == pytest.approx(nets[1][1], rel=1e-12)
    for a, b in zip(nets[0][0].parameters(), nets[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_sums_of_a_step_that_broke_off_are_dropped_and_a_second_gradient_of_one_micro_batch_is_refused() -> None:
    net, rule = nn.Linear(3, 2, bias=False), Adder()
    delivery = InBackward(net.named_parameters(), rule, None)
    for break_off in (delivery.discard, lambda: None):
        delivery.begin(0, 2)
        net(torch.ones(1, 3)).sum().backward()
        break_off()
        delivery.begin(0, 2)
        assert not rule.sums
        for _ in range(2):
            net(torch.ones(1, 3)).sum().backward()
        torch.testing.assert_close(rule.given.pop()[1], torch.full((2, 3), 2.0))
        with pytest.raises(ConflictError, match="a second gradient for weight"):
            net(torch.ones(1, 3)).sum().backward()
        delivery.end(0)
