"""Answer a simulated operator from memory: same operator, same shapes, same answer.

A training step calls a few hundred distinct operators tens of thousands of times. torch keeps a cache of them too, but
builds its key from every property a tensor may have, which takes four fifths of a simulation. Here the key is what a
dense simulated tensor is: shape, strides and dtype, and whether it was an argument before. What is anything else (a
constant's value is known, another layout, a real tensor among simulated ones) goes to torch. Remembered is of each
output whether it *is* an argument (in-place operators), a view of one, or a new tensor. Where in its storage an
argument begins changes no answer but a view's, and that by as much; `as_strided` alone counts from the storage's start.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.core.memory import simulated

#: One output: ("same", argument), ("view", argument, shape, strides, offset from the argument's, dtype),
#: ("new", shape, strides, dtype, device), or ("none",).
_Output = tuple[Any, ...]
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
#: Views at a place of the storage, not of the argument: torch answers.
_ABSOLUTE = ("aten::as_strided", "aten::set_")


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
            given = _described(args, tensors)
            words = (tuple(kwargs), _described(kwargs.values(), tensors)) if kwargs else None
        except _Unknown:
            return func(*args, **kwargs)
        key: tuple[Any, ...]
        if tensors:
            mode = tensors[0].fake_mode
            key = (func, given, words)
        else:
            # A tensor made from nothing is simulated if a mode says so; its dtype may be the default of the moment.
            active = simulated.active_mode()
            if active is None:
                return func(*args, **kwargs)
            mode, key = active, (func, given, words, torch.get_default_dtype())
        self.asked += 1
        known = self._answers.get(key, _NEVER)
        if known is _NEVER:
            out = func(*args, **kwargs)
            self._answers[key] = _remember(func, out, tensors)
            return out
        if known is None:
            return func(*args, **kwargs)
        self.answered += 1
        several, outputs = known
        if several:
            return tuple([_made(output, tensors, mode) for output in outputs])
        return _made(outputs[0], tensors, mode)


#: Answers for all simulations of the process.
memory = Remembered()


class Remembering(TorchDispatchMode):
    """Answers simulated operators from `memory`, for what is simulated without a tracker: a model that is built."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types or not types:
            return memory.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


#: Stands for "never asked": None is the answer of what cannot be remembered.
_NEVER: Any = object()


def _described(values: Any, tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """A hashable description of arguments; simulated tensors are collected in order."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                raise _Unknown
            found.append((value.shape, value.stride(), value.dtype, value._fake_device, _first(tensors, value)))
            tensors.append(value)
        elif kind in _PLAIN:
            found.append((kind, value))
        elif kind in (list, tuple, torch.Size):
            found.append(_described(value, tensors))
        else:
            raise _Unknown
    return tuple(found)


def _first(tensors: list[FakeTensor], value: FakeTensor) -> int | None:
    """One tensor given twice is another question than two that are alike: where it was first given."""
    for index, tensor in enumerate(tensors):
        if tensor is value:
            return index
    return None


def _remember(func: Any, out: Any, tensors: list[FakeTensor]) -> tuple[bool, tuple[_Output, ...]] | None:
    """How to make `out` again from the arguments; None when that cannot be told."""
    if not func._schema.returns and out is None:
        return False, (("none",),)
    several = isinstance(out, (tuple, list))
    if isinstance(out, list) or func._schema.name.startswith(_ABSOLUTE):
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
            index = storages[storage._cdata]
            base = tensors[index]
            if base.dtype != value.dtype:  # offsets are in elements
                return None
            offset = value.storage_offset() - base.storage_offset()
            outputs.append(("view", index, shape, strides, offset, value.dtype))
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


def _made(output: _Output, tensors: list[FakeTensor], mode: FakeTensorMode) -> Tensor | None:
    kind = output[0]
    if kind == "new":
        return simulated.new(mode, *output[1:])
    if kind == "view":
        _, index, shape, strides, offset, dtype = output
        base = tensors[index]
        return simulated.view(base, shape, strides, base.storage_offset() + offset, dtype)
    return tensors[output[1]] if kind == "same" else None
