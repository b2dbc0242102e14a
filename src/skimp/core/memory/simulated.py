"""Make simulated tensors at a quarter of torch's price, for what makes tens of thousands of them.

`FakeTensor(mode, meta, device)` checks its arguments and sets twenty attributes one by one: 16 microseconds. All plain
tensors of one mode differ in nothing but their meta tensor and device, so that the attributes of the first one that
torch made are those of every other. `tests/core` holds such a tensor against torch's, attribute by attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_META = torch.device("meta")
#: Attributes of a plain simulated tensor by device, all but its mode.
_attributes: dict[torch.device, dict[str, Any]] = {}


def new(
    mode: FakeTensorMode, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A simulated tensor on `device` with a storage of its own."""
    with torch._C._DisableTorchDispatch():
        return _simulated(torch.empty_strided(shape, strides, dtype=dtype, device=_META), mode, device)


def view(base: FakeTensor, shape: Sequence[int], strides: Sequence[int], offset: int, dtype: torch.dtype) -> Tensor:
    """A simulated tensor on the storage of `base`; `offset` in elements of `dtype`."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty(0, dtype=dtype, device=_META)
        meta.set_(base.untyped_storage(), offset, shape, strides)
        return _simulated(meta, base.fake_mode, base.fake_device)


def active_mode() -> FakeTensorMode | None:
    """The mode that simulates now; None on real tensors."""
    found: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return found


def _simulated(meta: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    known = _attributes.get(device) or _first(mode, device)
    made = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    attributes = made.__dict__
    attributes.update(known)
    attributes["fake_mode"] = mode
    return made


def _first(mode: FakeTensorMode, device: torch.device) -> dict[str, Any]:
    """Attributes of a tensor that torch makes."""
    known = dict(vars(FakeTensor(mode, torch.empty(0, device=_META), device)))
    del known["fake_mode"]  # it must not outlive its simulation
    return _attributes.setdefault(device, known)
