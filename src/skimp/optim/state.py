"""State as plain data: what a rule promises, its flat names, its bytes, and the check of what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import CheckpointError

#: Shape and dtype of every state tensor of one parameter, by key.
Spec = dict[str, tuple[tuple[int, ...], torch.dtype]]


def state_key(parameter: str, key: str) -> str:
    """The flat name of a state entry in a checkpoint: "layers.0.weight" and "m" → "layers.0.weight.m"."""
    return f"{parameter}.{key}"


def check_saved(rule: str, name: str, spec: Spec, saved: Mapping[str, Any], numbers: Sequence[str] = ("step",)) -> None:
    """Hold the saved state of parameter `name` against what `rule` promises: tensors by `spec`, and `numbers`.

    Raises:
        CheckpointError: other keys, or a tensor of another shape or dtype.
    """
    if set(saved) != {*numbers, *spec}:
        raise CheckpointError(
            f"state of '{name}' for {rule}: {', '.join([*numbers, *spec])}",
            ", ".join(map(str, saved)) or "nothing",
            "it was saved by another rule, or for another shape or dtype",
            "resume with the rule that saved it, or start with fresh state",
        )
    for key, (shape, dtype) in spec.items():
        value = saved[key]
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise CheckpointError(
                f"state '{state_key(name, key)}' as {dtype} {shape}",
                found,
                "a state is never cast: its numbers would change in silence",
                "resume with the optimizer options and dtype that saved it",
            )


def entry(saved: Mapping[str, Any], key: str, rule: str) -> Any:
    """One saved value; a missing one is named.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return saved[key]
    except KeyError as error:
        raise CheckpointError(
            f"state '{key}' of {rule}", "not in the checkpoint", instead="resume with the rule that saved it"
        ) from error


def state_nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one state tensor."""
    n = dtype.itemsize
    for size in shape:
        n *= size
    return n
