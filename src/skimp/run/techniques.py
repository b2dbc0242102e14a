"""What a recipe and its exact choices switch on, by the names of the registry."""

from __future__ import annotations

from typing import Any

from skimp.core import attention
from skimp.core.errors import ConflictError
from skimp.core.exact import ExactChoices
from skimp.kernels.native import library


def uses_fused(recipe: Any) -> bool:
    """Fused layers wherever their native form is built and the run is on the CPU, unless the recipe pins plain ones.

    Raises:
        ConflictError: fused layers are pinned and cannot be had.
    """
    if recipe.exact.kernels == "fused" and not library.available():
        raise ConflictError(
            "exact.kernels=fused",
            f"native kernels: {library.why()}",
            "the fused layers are C",
            ["python -m skimp.kernels.native", "exact.kernels=null: fused where it can be"],
        )
    if recipe.activations.pamm is not None and recipe.exact.kernels is None and recipe.precision != "fp32":
        return False  # norms run plain in bfloat16 unless asked for by name, and points are of what they keep
    return recipe.exact.kernels != "plain" and attention.target_device() == "cpu" and library.available()


def rule_name(recipe: Any) -> str:
    """The registered update rule: `adamw` on bfloat16 weights is the one that rounds stochastically."""
    name: str = recipe.optimizer.name
    # What an adapter trains is float32 beside a bfloat16 base.
    bf16 = recipe.precision == "bf16" and recipe.adapter is None
    return "adamw-bf16" if bf16 and name == "adamw" else name


def techniques(recipe: Any, exact: ExactChoices) -> list[str]:
    """The registered methods a run switches on, for the early refusal of pairs that cannot go together."""
    names = [rule_name(recipe), "first-order", "chunked-cross-entropy"]
    names += [recipe.adapter.name] if recipe.adapter is not None else []
    names += ["momentum-reset"] if recipe.train.restart is not None else []
    names += [recipe.model.weights.name] if recipe.model.weights is not None else []
    names += ["packing"] if recipe.data.packing else []
    names += [recipe.train.layers.name] if recipe.train.layers is not None else []
    names += ["derivative"] if recipe.activations.derivative is not None else []
    names += ["pamm"] if recipe.activations.pamm is not None else []
    names += [recipe.attention.name] if recipe.attention is not None else []
    names += ["recompute"] if exact.recompute else []
    names += ["selective-recompute"] if {*exact.kept().values()} - {"nothing"} else []
    names += ["chunked-mlp"] if exact.mlp_chunk is not None else []
    names += ["coded-activations"] if recipe.activations.kept_bits is not None else []
    names += ["step-in-backward"] if exact.in_backward else []
    names += ["activation-offload"] if exact.offload else []
    names += ["state-offload"] if exact.states != "device" else []
    names += ["fused-rmsnorm", "fused-swiglu"] if uses_fused(recipe) else []
    names += ["fused-rotary"] if uses_fused(recipe) and recipe.precision != "bf16" else []
    return names
