"""What is put around a model's modules for a run's exact choices, and the names that a peak's address is made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from skimp.activations.chunked_mlp import ChunkedMLP
from skimp.activations.coded import Coded
from skimp.activations.derivative import Coding
from skimp.activations.derivative_apply import Derivatives
from skimp.activations.pamm import PAMM
from skimp.activations.recompute import Recompute
from skimp.core.exact import ExactChoices
from skimp.core.memory.tracker import at, current
from skimp.core.structure import Structure
from skimp.kernels.apply import Fused


def recomputed(model: nn.Module, structure: Structure, exact: ExactChoices) -> Recompute | None:
    """The chosen blocks, wrapped; None without any."""
    if not exact.recompute:
        return None
    kept = exact.kept()
    return Recompute(model, [structure.blocks[i] for i in kept], keep=tuple(kept.values()))


def chunked_mlps(model: nn.Module, structure: Structure, exact: ExactChoices) -> ChunkedMLP | None:
    """The blocks' MLPs in chunks; None where they run whole.

    Raises:
        ConflictError: the model's blocks have no MLP that can.
    """
    return None if exact.mlp_chunk is None else ChunkedMLP(model, structure, exact.mlp_chunk)


def coded_derivatives(recipe: Any, model: nn.Module, structure: Structure, fused: Fused | None) -> Derivatives | None:
    """Activations and norms that keep codes; None where the recipe asks for none.

    Raises:
        ConflictError: the model has nothing to code.
    """
    asked = recipe.activations.derivative
    if asked is None:
        return None
    coding = Coding(grid=asked.grid, rounding=asked.rounding, seed=recipe.train.seed)
    return Derivatives(model, structure, coding, fused)


def pointed(model: nn.Module, structure: Structure, recipe: Any) -> PAMM | None:
    """Queries, keys and values that keep points of their input; None where the recipe asks for none.

    Raises:
        ConflictError: the model has no such layers.
    """
    asked = recipe.activations.pamm
    return None if asked is None else PAMM(model, structure, asked.one_of, asked.eps, recipe.train.seed)


def coded(model: nn.Module, structure: Structure, recipe: Any) -> Coded | None:
    """What blocks keep in fewer bits; None where the recipe does not ask for it."""
    bits = recipe.activations.kept_bits
    return None if bits is None else Coded(model, structure.blocks, structure.heads, bits)


def name_blocks(model: nn.Module, structure: Structure) -> None:
    """Tell the tracker which block is at work, forward and backward, so that a peak has an address."""

    def after(index: int, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if current() is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: at(f"block {index}"))

    for index, name in enumerate(structure.blocks):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, index=index: at(f"block {index}"))
        module.register_forward_hook(lambda _m, _i, output, index=index: after(index, output))
