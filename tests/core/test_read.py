"""Reading a value: the number of a real tensor, the declared branch of a simulated one."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.core.read import is_simulated, read


def test_real_tensors_give_their_number() -> None:
    assert read(torch.tensor(2.5), expect=9.0) == 2.5
    assert read(torch.tensor([[True]]), expect=9.0) == 1.0
    assert read(torch.tensor(3, dtype=torch.int64), expect=9.0) == 3.0
    assert read(torch.tensor(1.5, requires_grad=True), expect=9.0) == 1.5
    assert read(torch.tensor(0.25, dtype=torch.bfloat16), expect=9.0) == 0.25
    assert read(torch.tensor(float("nan")), expect=9.0) != read(torch.tensor(0.0), expect=9.0)


def test_simulated_tensors_give_the_declared_branch() -> None:
    with FakeTensorMode():
        fake = torch.zeros(())
    assert is_simulated(fake)
    assert read(fake, expect=7.0) == 7.0
    assert read(torch.zeros((), device="meta"), expect=7.0) == 7.0
    assert not is_simulated(torch.zeros(()))


def test_a_read_is_one_operator_so_that_a_tracker_can_leave_it_out() -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Names():
        read(torch.ones((), requires_grad=True), expect=0.0)
    assert names[-1:] == ["aten._local_scalar_dense.default"]
    assert "aten.detach.default" not in names
