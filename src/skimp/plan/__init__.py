"""Simulate a run, search the exact techniques for a budget, explain. `skimp.plan(recipe, …)` calls `skimp.api.plan`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """`skimp.plan` is this package and, as the design's Python form says, also the verb."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        # By name: the api stands above this floor.
        return import_module("skimp.api").plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
