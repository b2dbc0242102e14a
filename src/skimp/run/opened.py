"""A found model with its weights in memory, ready to be used: storage first, then filled tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from skimp.core.errors import ModelError, did_you_mean
from skimp.core.structure import TESTED_FAMILIES, Structure, read_structure
from skimp.kernels.apply import Fused
from skimp.kernels.sparse_apply import SparseAttention
from skimp.run.attend import attended
from skimp.run.build import DTYPES
from skimp.run.build_checks import check_path
from skimp.run.found import Found
from skimp.run.head import Head
from skimp.run.skeleton import materialise, skeleton
from skimp.run.weights import fill_from

#: What a user may ask to compute in. Half precision is left out: a CPU has no arithmetic for it.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Opened:
    """A model with its weights in memory, in evaluation mode; no parameter asks for a gradient.

    Attributes:
        sparse: its attention modules that attend over a pattern, as in the run that trained it; None without.
    """

    found: Found
    model: nn.Module
    structure: Structure
    head: Head
    dtype: torch.dtype
    sparse: SparseAttention | None = None


def settle_dtype(found: Found, precision: str | None) -> torch.dtype:
    """What to compute in: as asked, as the run computed, or as the weights are stored (half precision as float32).

    Raises:
        ModelError: an unknown precision.
    """
    if precision is not None:
        if precision not in PRECISIONS:
            raise ModelError(f"precision {precision}", "unknown", instead=did_you_mean(precision, PRECISIONS))
        return PRECISIONS[precision]
    if found.recipe is not None:
        return DTYPES[found.recipe.precision]
    specs = found.stored.specs().values()
    widest = max(specs, key=lambda spec: spec.nbytes).dtype
    return torch.bfloat16 if widest == torch.bfloat16 else torch.float32


def open_model(
    found: Found, precision: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Opened:
    """Load the weights, tensor by tensor, ready for evaluation and generation. Peak = the model + one tensor.

    Args:
        found: from `find`; it may be closed afterwards.
        precision: "fp32" or "bf16"; None as `settle_dtype` says.
        progress: called with (tensors filled, tensors).

    Raises:
        ModelError: a missing or misshapen tensor, or a family whose head is not understood.
    """
    dtype = settle_dtype(found, precision)
    model = skeleton(found.config, dtype)
    structure = read_structure(model)
    materialise(model, dtype, lambda shape, kind: torch.empty(shape, dtype=kind))
    model.requires_grad_(False)
    fill_from(model, found.stored, found.asked, progress)
    found.stored.check()
    found.finish(model, structure)
    if structure.family not in TESTED_FAMILIES:
        check_path(model, structure)
    return dress(found, model, structure, dtype, precision)


def dress(found: Found, model: nn.Module, structure: Structure, dtype: torch.dtype, precision: str | None) -> Opened:
    """Fused layers where they are built, as in training, and the head; evaluation mode."""
    mixed = precision is None and found.recipe is not None and found.recipe.precision == "bf16-mixed"
    if found.recipe is None or found.recipe.exact.kernels != "plain":
        Fused(model)
    sparse = attended(model, structure, found.recipe)
    model.eval()
    return Opened(found, model, structure, Head(model, structure, autocast=mixed), dtype, sparse)
