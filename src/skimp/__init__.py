"""skimp on memory, not on the model: plan, train and hand over large language models on machines that are too small.

>>> import skimp
>>> plan = skimp.plan("examples/quickstart.yaml", budget="2GB")
>>> if plan.fits:
...     result = skimp.train("examples/quickstart.yaml", budget="2GB")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"
__all__ = ["plan", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("skimp.api").train
    if name == "plan":
        return import_module("skimp.plan")
    raise AttributeError(f"module 'skimp' has no attribute '{name}'")
