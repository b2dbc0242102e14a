"""Did an update rule do anything? Asked once, after the first optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from skimp.core.errors import EffectError
from skimp.core.read import read
from skimp.core.sharded import local
from skimp.optim.elsewhere import any_nonzero
from skimp.optim.options import lr_of

if TYPE_CHECKING:
    from skimp.optim.base import UpdateRule

#: States that are not all zero once a gradient came, the surest first.
MOMENTS = ("m_absmax", "m", "v_absmax", "v", "rows")


def assert_effect(rule: UpdateRule, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Hold the first optimizer step to its promise.

    Args:
        rule: the optimizer.
        before, after: the same named parameters (any sample of them) around one step.

    Raises:
        EffectError: no parameter was updated; state has another dtype or shape than promised; or
            gradients arrived, the learning rate was not zero, and no sampled parameter moved.
    """
    updated = [p for p in rule.parameters() if rule.state.get(p, {}).get("step", 0) > 0]
    if not updated:
        raise EffectError(f"'{rule.rule}' updates parameters", "no parameter has taken a step")
    for p in updated:
        for key, (shape, dtype) in rule.spec_of(p).items():
            held = rule.state[p].get(key)
            if held is None or held.dtype != dtype or tuple(held.shape) != shape:
                found = "nothing" if held is None else f"{held.dtype} {tuple(held.shape)}"
                raise EffectError(f"'{rule.rule}' keeps {key} of '{rule.name_of(p)}' as {dtype} {shape}", found)
    due = [rule.name_of(p) for p in updated if rule.name_of(p) in before and _should_move(rule, p)]
    if due and not any(_differ(before[name], after[name]) for name in due):
        raise EffectError(
            f"'{rule.rule}' moves parameters",
            f"{len(due)} with a gradient did not change in any bit: {', '.join(due[:5])}",
            "the update is below the weights' step, or is written to a copy",
        )


def _should_move(rule: UpdateRule, p: Tensor) -> bool:
    """A non-zero first moment after the step means that a gradient came."""
    state = rule.state[p]
    moment = next((key for key in MOMENTS if key in state), None)
    return moment is not None and lr_of(rule.group_of(p)) != 0.0 and any_nonzero(rule, p, moment)


def _differ(a: Tensor, b: Tensor) -> bool:
    return read((local(a) != local(b)).any(), expect=1.0) > 0
