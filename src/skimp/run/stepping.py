"""How a run's gradients reach its rule, and what makes its step of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from skimp.core.exact import ExactChoices
from skimp.core.gradients import AfterBackward, Delivery, InBackward
from skimp.run.head import Head
from skimp.steps.first_order import FirstOrder
from skimp.steps.layer_sampled import LayerSampled
from skimp.steps.layers import LayerSampler


def stepper_of(head: Head, delivery: Delivery, layers: LayerSampler | None) -> FirstOrder:
    """The step: first order, over all that trains or over a few blocks of it."""
    return FirstOrder(head.loss, delivery) if layers is None else LayerSampled(head.loss, delivery, layers)


def delivery_of(
    recipe: Any, exact: ExactChoices, named: Iterable[tuple[str, nn.Parameter]], optimizer: Any, sinks: Iterable[str]
) -> Delivery:
    """Gradients to the rule after backward, or in it."""
    if not exact.in_backward:
        return AfterBackward(named, optimizer, recipe.train.clip, sinks)
    return InBackward(named, optimizer, recipe.train.clip, sinks)


def sink_of(delivery: Delivery) -> Callable[[], Tensor | None] | None:
    """The buffer of the head's gradient (a tied embedding's too); None when the head is frozen."""
    name = next(iter(delivery.sinks), None)
    return None if name is None else lambda: delivery.sink(name)
