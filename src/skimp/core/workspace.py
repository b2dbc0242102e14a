"""Stated workspace: what an operator allocates inside one dispatcher call.

The memory tracker sees operators, not what they allocate within. An operator whose implementation is Python
(`torch.library.custom_op`) or which takes scratch therefore *declares* its peak of transient bytes, as a
function of its arguments' shapes and dtypes only, so that the same rule serves real and fake tensors. The
figure is held against the c10 allocator's own events (`torch.profiler(profile_memory=True)`) by a test per
operator: c10's CPU allocator reports exactly the bytes asked for, so the agreement is to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skimp.core.errors import SkimpError

Rule = Callable[[tuple[Any, ...], dict[str, Any]], int]

#: CPU bytes of the 0-dim tensor that torch makes of a Python number in `tensor.mul_(0.9)`: one float64 or
#: int64.
SCALAR_BYTES = 8

#: The same where torch also casts it to the tensor's float32, in comparisons and `masked_fill_`: 8 + 4.
CAST_SCALAR_BYTES = 12

_rules: dict[str, Rule] = {}


def declare_workspace(op_name: str) -> Callable[[Rule], Rule]:
    """Declare the transient bytes of operator `op_name` ("namespace::name").

    The decorated `fn(args, kwargs)` returns the peak of bytes that live only during the call, on top of its
    outputs.

    Raises:
        SkimpError: the operator has a rule already; two rules for one operator could disagree.
    """

    def keep(rule: Rule) -> Rule:
        if op_name in _rules:
            raise SkimpError(f"one workspace rule for {op_name}", "two", instead="declare it once")
        _rules[op_name] = rule
        return rule

    return keep


def workspace_bytes(op_name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> int:
    """Peak transient bytes of one call; 0 for an operator that declares nothing.

    Args:
        op_name: "skimp::adamw8bit"; an overload suffix (".default") is ignored.
        args, kwargs: as the dispatcher got them, with real or fake tensors.
    """
    rule = _rules.get(op_name.split(".")[0])
    return 0 if rule is None else rule(args, kwargs or {})


def declared() -> dict[str, Rule]:
    """A copy of all rules, by operator name."""
    return dict(_rules)
