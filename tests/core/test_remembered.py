"""Operators answered from memory are torch's own answers, and what cannot be described is asked of torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.core.memory import simulated
from skimp.core.memory.remembered import Remembered


class Asking(TorchDispatchMode):
    """Every operator through one memory; the outputs are kept."""

    def __init__(self, memory: Remembered) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not types or any(t is FakeTensor for t in types):
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


def test_operators_without_a_result_are_answered() -> None:
    """An update rule changes its tensors in place and returns nothing."""
    memory, mode = Remembered(), FakeTensorMode()
    with mode:
        state = [[torch.empty(3)] for _ in range(5)]
        options = {"lr": 1.0, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1.0}
        options |= {"amsgrad": False, "maximize": False}
        step = [torch.empty(())]
        with Asking(memory):
            for _ in range(2):
                torch._fused_adamw_(*state, step, **options)
    assert memory.answered == 1


def test_a_place_in_the_storage_changes_no_answer_and_a_views_by_as_much() -> None:
    memory, mode = Remembered(), FakeTensorMode()
    with mode:
        a = torch.empty(40)
        for at in (0, 10, 20):
            with Asking(memory):
                part = a[at : at + 10].view(2, 5).t()
                new = part + 1
            assert (part.storage_offset(), part.stride(), new.storage_offset()) == (at, (1, 5), 0)
        with Asking(memory):
            assert a[10:].as_strided((2,), (1,)).storage_offset() == 10
            assert (
                a[10:].as_strided((2,), (1,), 5).storage_offset() == a[20:].as_strided((2,), (1,), 5).storage_offset()
            )
    assert memory.answered >= 6


def test_tensors_made_from_nothing_follow_the_default_dtype_and_real_ones_stay_real() -> None:
    memory, mode = Remembered(), FakeTensorMode()
    old = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            with mode, Asking(memory):
                made = torch.zeros(3)
            assert (made.dtype, type(made)) == (dtype, FakeTensor)
        with Asking(memory):
            real = torch.zeros(3)
        assert type(real) is Tensor
        assert real.tolist() == [0.0, 0.0, 0.0]
    finally:
        torch.set_default_dtype(old)
    assert memory.answered >= 2


def test_a_tensor_made_here_is_torchs_own_in_every_attribute() -> None:
    device = torch.device("cpu")
    for mode in (FakeTensorMode(), FakeTensorMode()):
        own = FakeTensor(mode, torch.empty(2, 3, device="meta"), device)
        for made in (
            simulated.new(mode, (2, 3), (3, 1), torch.float32, device),
            simulated.view(own, (2, 3), (3, 1), 0, torch.float32),
        ):
            assert vars(made) == vars(own)
            assert (type(made), made.shape, made.dtype, made.device) == (type(own), own.shape, own.dtype, own.device)
            assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(own)
            assert (made.requires_grad, made.grad_fn, made.is_leaf) == (False, None, True)
            with mode, pytest.raises(RuntimeError):
                made.numpy()


def test_a_simulation_that_is_over_is_not_kept_alive() -> None:
    mode = FakeTensorMode()
    simulated.new(mode, (2,), (1,), torch.float32, torch.device("cpu"))
    with mode, Asking(Remembered()):
        (torch.zeros(3) + 1).sum()
    seen = weakref.ref(mode)
    del mode
    gc.collect()
    assert seen() is None
