"""Answer a simulated operator from memory: same operator, same shapes, same answer.

A training step calls a few hundred distinct operators tens of thousands of times. torch keeps a cache of them too, but
builds its key from every property a tensor may have, which takes four fifths of a simulation. Here the key is what a
dense simulated tensor is: shape, strides, offset and dtype, and whether it was an argument before. What is anything
else (a constant's value is known, another layout, a real tensor among simulated ones) goes to torch. Remembered is of
each output whether it *is* an argument (in-place operators), a view of one, or a new tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

#: One output: ("same", argument), ("view", argument, shape, strides, offset, dtype), ("new", shape, strides, dtype),
#: or ("none",).
_Output = tuple[Any, ...]
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class _Unknown(Exception):
    """An argument that a key cannot describe."""


class Remembered:
    """Outputs of simulated operators by what went in. One memory serves all simulations of a process."""

    def __init__(self) -> None:
        self._answers: dict[Any, tuple[bool, tuple[_Output, ...]] | None] = {}
        self.asked = self.answered = 0

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)` on simulated tensors, from memory where it is known."""
        tensors: list[FakeTensor] = []
        try:
            key = (func, _described(args, tensors), _described_words(kwargs, tensors) if kwargs else None)
        except _Unknown:
            return func(*args, **kwargs)
        if not tensors:
            return func(*args, **kwargs)
        self.asked += 1
        if key in self._answers:
            known = self._answers[key]
            if known is not None:
                self.answered += 1
                several, outputs = known
                made = [_made(output, tensors) for output in outputs]
                return tuple(made) if several else made[0]
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._answers[key] = _remember(func, out, tensors)
        return out


def _described(values: Any, tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """A hashable description of arguments; simulated tensors are collected in order."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                raise _Unknown
            # One tensor given twice is another question than two that are alike.
            first = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
            tensors.append(value)
            found.append(
                (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device.type, first)
            )
        elif kind in _PLAIN:
            found.append((kind, value))
        elif kind in (list, tuple, torch.Size):
            found.append(_described(value, tensors))
        else:
            raise _Unknown
    return tuple(found)


def _described_words(kwargs: dict[str, Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
    return (tuple(kwargs), _described(kwargs.values(), tensors))


def _remember(func: Any, out: Any, tensors: list[FakeTensor]) -> tuple[bool, tuple[_Output, ...]] | None:
    """How to make `out` again from the arguments; None when that cannot be told."""
    several = isinstance(out, (tuple, list))
    if isinstance(out, list):
        return None
    outputs: list[_Output] = []
    storages = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(tensors)))}
    fresh: set[int] = set()
    for value in out if several else (out,):
        if value is None:
            outputs.append(("none",))
            continue
        if type(value) is not FakeTensor or value.constant is not None or value.layout is not torch.strided:
            return None
        same = next((i for i, t in enumerate(tensors) if t is value), None)
        shape, strides = tuple(value.shape), value.stride()
        storage = value.untyped_storage()
        if same is not None:
            outputs.append(("same", same))
        elif storage._cdata in storages:
            offset = value.storage_offset()
            outputs.append(("view", storages[storage._cdata], shape, strides, offset, value.dtype))
        elif storage._cdata in fresh or value.storage_offset() != 0 or value.is_conj() or value.is_neg():
            return None
        else:
            if storage.nbytes() != _reach(shape, strides) * value.element_size():
                return None
            fresh.add(storage._cdata)
            outputs.append(("new", shape, strides, value.dtype, value.fake_device))
    if any(o[0] == "same" for o in outputs) != func._schema.is_mutable:
        return None
    return several, tuple(outputs)


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last of a strided tensor."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _made(output: _Output, tensors: list[FakeTensor]) -> Tensor | None:
    kind = output[0]
    if kind == "same":
        return tensors[output[1]]
    if kind == "none":
        return None
    if kind == "new":
        _, shape, strides, dtype, device = output
        mode = tensors[0].fake_mode
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(mode, empty, device)
    _, index, shape, strides, offset, dtype = output
    base = tensors[index]
    with in_kernel_invocation_manager(base.fake_mode):
        empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        empty.set_(base.untyped_storage(), offset, shape, strides)
    return FakeTensor(base.fake_mode, empty, base.fake_device)
