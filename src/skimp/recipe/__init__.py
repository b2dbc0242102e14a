"""The description of a run: schema, presets, overrides, errors naming the key. Nothing here imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skimp.recipe.catalogue import Preset, presets
    from skimp.recipe.devices import Card, Gpus, cards, resolve_gpu
    from skimp.recipe.families import parameter_count
    from skimp.recipe.fetch import check_model, fetch_model
    from skimp.recipe.host import HostBudget, host_budget
    from skimp.recipe.load import load_recipe
    from skimp.recipe.models import resolve_model
    from skimp.recipe.resume import fingerprint, may_change_on_resume
    from skimp.recipe.schema import Recipe, json_schema
    from skimp.recipe.source import ModelSource

_WHERE = {
    "Card": "devices",
    "Gpus": "devices",
    "cards": "devices",
    "resolve_gpu": "devices",
    "parameter_count": "families",
    "HostBudget": "host",
    "host_budget": "host",
    "load_recipe": "load",
    "ModelSource": "source",
    "check_model": "fetch",
    "fetch_model": "fetch",
    "resolve_model": "models",
    "Preset": "catalogue",
    "presets": "catalogue",
    "fingerprint": "resume",
    "may_change_on_resume": "resume",
    "Recipe": "schema",
    "json_schema": "schema",
}

__all__ = [
    "Card",
    "Gpus",
    "HostBudget",
    "ModelSource",
    "Preset",
    "Recipe",
    "cards",
    "check_model",
    "fetch_model",
    "fingerprint",
    "host_budget",
    "json_schema",
    "load_recipe",
    "may_change_on_resume",
    "parameter_count",
    "presets",
    "resolve_gpu",
    "resolve_model",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"skimp.recipe.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'skimp.recipe' has no attribute '{name}'")
