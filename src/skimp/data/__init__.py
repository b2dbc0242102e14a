"""data: its methods, listed without importing them; public names load when first asked for."""

from __future__ import annotations

import importlib
from typing import Any

from skimp.core.registry import Facts

FACTS: list[Facts] = [
    Facts(
        name="packing",
        kind="data stage",
        summary="fills every row with documents, with no attention across them and fresh positions: the "
        "loss of a token is defined as before, only which tokens share a batch changes",
        where="skimp.data.packing:lay_rows",
        attacks=("activations", "logits", "data"),
        exact=True,
        saves="the padding: rows x seq_len - documents' tokens positions per epoch are never computed",
        needs=("attention that splits at the batch's document boundaries",),
        recipe="data: {packing: true}",
    ),
]

_PUBLIC = {
    "TextData": "skimp.data.textdata",
    "TrainSource": "skimp.data.textdata",
    "Fields": "skimp.data.kinds",
    "MixedStream": "skimp.data.mixture",
    "prepare": "skimp.data.preparation",
    "PreparedText": "skimp.data.prepared",
    "DataReport": "skimp.data.report",
    "SetReport": "skimp.data.report",
    "TokenStream": "skimp.data.stream",
    "StreamedText": "skimp.data.streaming",
    "TokenStore": "skimp.data.store",
    "lay_rows": "skimp.data.packing",
    "synthetic_batch": "skimp.data.synthetic",
}

__all__ = ["FACTS", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'skimp.data' has no attribute '{name}'")
