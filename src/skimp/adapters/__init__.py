"""adapters: small additions to a frozen base. Methods are listed without importing them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skimp.adapters.family_facts import LOW_RANK
from skimp.adapters.side_facts import SIDE
from skimp.adapters.sketch_facts import SKETCHES
from skimp.adapters.slice_facts import SLICES
from skimp.core.registry import Facts

FACTS: list[Facts] = [*LOW_RANK, *SLICES, *SKETCHES, *SIDE]

_WHERE = {
    "Handle": "handle",
    "LoRA": "lora",
    "LoftQ": "loftq",
    "ReLoRA": "relora",
    "Shelf": "shelf",
    "QST": "qst",
    "S2A": "s2a",
    "S2FT": "s2ft",
    "S2FTSpec": "s2ft_select",
    "SST": "sst",
    "SSTSpec": "sst_spec",
    "Served": "s2ft_adapter",
    "SketchTune": "sketchtune",
    "SliceAdapter": "s2ft_adapter",
    "Spec": "spec",
    "attach_folder": "folder",
    "lora_linear": "linear",
    "lora_linear_reference": "linear",
    "match": "targets",
    "measured": "s2ft_scores",
    "save_folder": "folder",
    "side_by_side": "s2ft_adapter",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"skimp.adapters.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'skimp.adapters' has no attribute '{name}'")
