"""Native forms: fast implementations attached from above to operators that are defined below.

`core` imports nothing of skimp, yet its operators (noise, codecs) have native CPU forms in
`skimp.kernels.native`. So an operator asks here whether a native form is attached; without one its torch
reference runs. Both give the same bits, which tests hold, so that attaching changes time and workspace but
never numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from skimp.core.target import target_device

_native: dict[str, Callable[..., Any]] = {}
_reference_depth = 0


def attach(name: str, form: Callable[..., Any]) -> None:
    """Attach (or replace) the native CPU form of operator `name`."""
    _native[name] = form


def native_form(name: str, device: torch.device) -> Callable[..., Any] | None:
    """The native form for tensors on `device`, or None where the reference has to run: off the CPU, simulated too."""
    if _reference_depth or device.type != "cpu" or target_device() != "cpu":
        return None
    return _native.get(name)


@contextmanager
def reference_only() -> Iterator[None]:
    """Run the torch references inside this context, whatever is attached: to compare and to debug."""
    global _reference_depth
    _reference_depth += 1
    try:
        yield
    finally:
        _reference_depth -= 1
