"""Operators answered from memory are torch's own answers, and what cannot be described is asked of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.core.memory.remembered import Remembered


class Asking(TorchDispatchMode):
    """Every operator through one memory; the outputs are kept."""

    def __init__(self, memory: Remembered) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is FakeTensor for t in types):
            return self.memory.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def facts(value: Any, inputs: list[Tensor]) -> Any:
    """All that is known of a simulated tensor, and which inputs it shares its storage with."""
    if isinstance(value, (tuple, list)):
        return [facts(v, inputs) for v in value]
    if not isinstance(value, Tensor):
        return value
    place = value.untyped_storage()._cdata
    shared = [i for i, t in enumerate(inputs) if t.untyped_storage()._cdata == place]
    same = [i for i, t in enumerate(inputs) if t is value]
    return (
        tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device.type,
        value.untyped_storage().nbytes(), shared, same,
    )  # fmt: skip


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "product": lambda a, b: a @ b.t(),
    "sum with a number": lambda a, b: a + 2,
    "sum with a fraction": lambda a, b: a + 2.0,
    "in place": lambda a, b: a.mul_(3),
    "in place of a view": lambda a, b: a[1:].add_(b[1:]),
    "view": lambda a, b: a.view(-1)[3:],
    "expanded": lambda a, b: a[:1].expand(7, -1),
    "several views": lambda a, b: a.chunk(2, dim=1),
    "several new": lambda a, b: torch.topk(a, 2),
    "the same twice": lambda a, b: a * a,
    "two that are alike": lambda a, b: a * b,
    "another dtype": lambda a, b: a.to(torch.bfloat16),
    "concatenated": lambda a, b: torch.cat([a, b, a], dim=1),
    "list in place": lambda a, b: torch._foreach_add_([a, b], 1.0),
    "norm": lambda a, b: torch.linalg.vector_norm(a),
    "index": lambda a, b: a[torch.zeros(3, dtype=torch.int64)],
    "empty": lambda a, b: a[:0] + 1,
    "transposed product": lambda a, b: (a.t() @ b).contiguous(),
}


@pytest.mark.parametrize("name", CASES)
def test_the_second_answer_is_torchs_own(name: str) -> None:
    memory, mode = Remembered(), FakeTensorMode()

    def ask(through: Any) -> Any:
        with mode:
            a, b = torch.empty(5, 6), torch.empty(5, 6)
            with through:
                return facts(CASES[name](a, b), [a, b])

    own = ask(torch.no_grad())
    assert ask(Asking(memory)) == own
    assert ask(Asking(memory)) == own
    assert memory.asked >= 2


def test_most_of_the_second_time_is_answered() -> None:
    memory, mode = Remembered(), FakeTensorMode()
    for _ in range(2):
        with mode:
            a, b = torch.empty(5, 6), torch.empty(5, 6)
            with Asking(memory):
                (a @ b.t()).relu_().sum()
    assert memory.answered >= 4


def test_a_number_and_a_fraction_are_two_questions() -> None:
    memory, mode = Remembered(), FakeTensorMode()
    with mode:
        a = torch.empty(3, dtype=torch.int64)
        with Asking(memory):
            assert (a + 1).dtype == torch.int64
            assert (a + 1.0).dtype == torch.float32
            assert (a + True).dtype == torch.int64


def test_a_value_that_is_known_is_asked_of_torch() -> None:
    memory, mode = Remembered(), FakeTensorMode()
    with mode, Asking(memory):
        known = torch.tensor(3)
        assert int(known + 1) == 4
        assert int(known + 2) == 5
