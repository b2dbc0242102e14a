"""Native CPU kernels: one C file, built by `python -m skimp.kernels.native`, attached by `load()`.

Without a compiler the torch references run and give the same bits; `why()` says what is missing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["available", "load", "why"]

if TYPE_CHECKING:
    from skimp.kernels.native.library import available, load, why

_HOMES = {"available": "library", "load": "library", "why": "library"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"skimp.kernels.native.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'skimp.kernels.native' has no attribute '{name}'")
