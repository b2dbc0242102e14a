"""losses: heads and losses computed in chunks from hidden states. Listed here without importing torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skimp.core.registry import Facts, Paper

if TYPE_CHECKING:
    from skimp.losses.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from skimp.losses.evaluate import linear_cross_entropy_eval as linear_cross_entropy_eval
    from skimp.losses.head_spec import chunk_bytes as chunk_bytes
    from skimp.losses.head_spec import default_rows as default_rows
    from skimp.losses.reference import reference_cross_entropy as reference_cross_entropy
    from skimp.losses.tied import tied_embedding as tied_embedding

FACTS: list[Facts] = [
    Facts(
        name="chunked-cross-entropy",
        kind="loss head",
        summary="Cross-entropy straight from hidden states, a few rows at a time: tokens × vocabulary never "
        "exists, at the plain path's three matrix products (see also Cut Your Losses, arXiv 2411.09009).",
        where="skimp.losses.cross_entropy:linear_cross_entropy",
        attacks=("logits",),
        exact=True,
        saves="rows × V × 4 bytes of logits (256 rows or more) instead of tokens × V × 12; "
        "a tied or accumulated head also 4 × V × H bytes of gradient",
        paper=Paper("Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, "2410.10989"),
        needs=("a token-wise linear head; nothing else may read the logits",),
        recipe="exact: {loss_chunk: 256}  # always on; this pins its rows",
    ),
]

_WHERE = {
    "linear_cross_entropy": "cross_entropy",
    "linear_cross_entropy_eval": "evaluate",
    "tied_embedding": "tied",
    "reference_cross_entropy": "reference",
    "chunk_bytes": "head_spec",
    "default_rows": "head_spec",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"skimp.losses.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
