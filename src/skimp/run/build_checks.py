"""What a build refuses before a weight is loaded, or, for a family no test covers, right after."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from skimp.core.errors import ConflictError, ModelError
from skimp.core.exact import ExactChoices
from skimp.core.read import read
from skimp.core.registry import load
from skimp.core.structure import TESTED_FAMILIES, Structure
from skimp.core.target import target_device
from skimp.run.head import Head
from skimp.run.offloaded import check_places
from skimp.run.skeleton import attention_operators


def check_path(model: nn.Module, structure: Structure) -> None:
    """For a family no test covers: hidden states times the head must be the logits of the model's own forward.

    A family may scale, cap or project between the two; training would then follow another loss, silently.

    Raises:
        ModelError: they differ on eight tokens.
    """
    forward: Any = model.eval()
    ids = torch.arange(min(8, structure.vocab)).unsqueeze(0)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    with torch.no_grad():
        theirs = forward(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        ours = Head(model, structure).logits_of(ids, positions)
    model.train()
    gap = read((ours - theirs).abs().max() / theirs.abs().max(), expect=0.0)
    # bfloat16 weights round each product to 8 bits; a missing factor is tens of percent off.
    if not gap < 2e-2:
        raise ModelError(
            f"training a model of type '{structure.family}'",
            f"its logits differ from hidden states times the head by {gap:.1%} of the largest",
            "something between the two is not known here, and the loss would be another",
            "a tested family: " + ", ".join(TESTED_FAMILIES),
        )


def adds_up(recipe: Any) -> bool:
    """Whether the recipe's rule can add up micro-batches in less than their gradients' bytes (`core.gradients`)."""
    rule = load(recipe.optimizer.name, "update rule")
    return recipe.adapter is None and bool(getattr(rule, "adds_up", False))


def asks_compact(recipe: Any) -> bool:
    """Whether gradients of projected weights are to arrive projected (`optim.compact`)."""
    return bool(recipe.optimizer.options().get("compact"))


def basis_of_gradients(recipe: Any) -> bool:
    """Whether compact gradients have bases that are made of gradients, hence of a step's first micro-batch."""
    rule = load(recipe.optimizer.name, "update rule")
    return asks_compact(recipe) and bool(rule.bases_of_gradients)


def draws_codes(recipe: Any) -> bool:
    """Whether codes of derivatives are rounded at random, by the place of a number in its row."""
    return recipe.activations.derivative is not None and recipe.activations.derivative.rounding == "stochastic"


def draws_points(recipe: Any) -> bool:
    """Whether layers keep points of a micro-batch's tokens: other micro-batches have other points."""
    return recipe.activations.pamm is not None


def check_exact(exact: ExactChoices, recipe: Any) -> None:
    """In backward needs the whole step as one micro-batch: a gradient still to be added to is not final.

    And what waits elsewhere needs a place that is not the one that computes.
    """
    check_places(exact)
    rows = recipe.rows_per_step
    if basis_of_gradients(recipe) and exact.micro_rows < rows and not recipe.exact.micro_batch:
        raise ConflictError(
            f"micro-batches of {exact.micro_rows} of {rows} rows",
            f"optimizer.compact=true with {recipe.optimizer.name}",
            "a new basis is of the first micro-batch then, and not of the step's whole gradient",
            [f"exact.micro_batch={exact.micro_rows}, knowingly", f"exact.micro_batch={rows}"],
        )
    if draws_points(recipe) and exact.micro_rows < rows and not recipe.exact.micro_batch:
        raise ConflictError(
            f"micro-batches of {exact.micro_rows} of {rows} rows",
            f"activations.pamm={recipe.activations.pamm.one_of}",
            "the tokens that stand for others are those of a micro-batch: other micro-batches, other gradients",
            [f"exact.micro_batch={exact.micro_rows}, knowingly", f"exact.micro_batch={rows}"],
        )
    if draws_codes(recipe) and exact.mlp_chunk is not None:
        raise ConflictError(
            f"exact.mlp_chunk={exact.mlp_chunk}",
            "activations.derivative.rounding=stochastic",
            "draws are addressed by a number's place in its row, which a chunk of tokens does not know",
            ["exact.mlp_chunk=null", "activations.derivative.rounding=nearest"],
        )
    if basis_of_gradients(recipe) and exact.mlp_chunk is not None:
        raise ConflictError(
            f"exact.mlp_chunk={exact.mlp_chunk}",
            f"optimizer.compact=true with {recipe.optimizer.name}",
            "a layer hands its gradient's factors on as soon as it has them: a new basis would be of the first chunk's "
            "tokens, and a step in backward would move the weight before the second",
            ["exact.mlp_chunk=null", "optimizer.compact=false"],
        )
    if asks_compact(recipe) and exact.mlp_chunk is not None and exact.in_backward:
        raise ConflictError(
            f"exact.mlp_chunk={exact.mlp_chunk} with exact.in_backward=true",
            f"optimizer.compact=true with {recipe.optimizer.name}",
            "a layer hands its gradient's factors on as soon as it has them, and the first chunk's would move the "
            "weight before the second",
            ["exact.mlp_chunk=null", "exact.in_backward=false"],
        )
    if exact.in_backward and exact.micro_rows < rows and adds_up(recipe):
        if recipe.train.clip is not None:
            raise ConflictError(
                f"train.clip={recipe.train.clip:g} with exact.in_backward=true",
                f"micro-batches of {exact.micro_rows} of {rows} rows, added up as {recipe.optimizer.name} keeps them",
                "the norm to clip by is that of whole gradients, which never exist",
                [
                    "train.clip=null",
                    f"exact.micro_batch={rows}: two passes over all rows at once",
                    "exact.in_backward=false: gradients are held, 4 bytes a parameter in fp32",
                ],
            )
    elif exact.in_backward and exact.micro_rows < rows:
        raise ConflictError(
            "exact.in_backward=true",
            f"micro-batches of {exact.micro_rows} of {rows} rows",
            "the gradient of one micro-batch is not the step's gradient, and it is freed before the next",
            [
                f"exact.micro_batch={rows}: all rows at once, activations of {rows} rows",
                "exact.in_backward=false: gradients are held, 4 bytes a parameter in fp32",
            ],
        )


def check_positions(recipe: Any, structure: Structure) -> None:
    """The sequence must lie within the positions the model was trained with, unless the recipe says otherwise."""
    if recipe.data.seq_len > structure.positions and recipe.model.positions != "extend":
        raise ModelError(
            f"data.seq_len {recipe.data.seq_len}",
            f"{structure.positions} positions in the model's config",
            "beyond them rotary angles were never trained and learned positions do not exist",
            [f"data.seq_len={structure.positions}", "model.positions=extend, for rotary models, knowingly"],
        )


def check_blocks(exact: ExactChoices, structure: Structure) -> None:
    """Every block named for recompute or offload must exist."""
    for key, named in (("recompute", exact.recompute), ("offload.blocks", exact.offload)):
        wrong = [i for i in named if i >= len(structure.blocks)]
        if wrong:
            raise ModelError(
                f"exact.{key}: block {wrong[0]}", f"{len(structure.blocks)} blocks, 0 to {len(structure.blocks) - 1}"
            )


def keeps_attention(recipe: Any, config: dict[str, Any], target: str) -> tuple[bool, ...]:
    """Of each block, whether its attention's result can be kept (`attention_operators`)."""
    dtype = torch.float32 if recipe.precision == "fp32" else torch.bfloat16
    return attention_operators(config, recipe.data.seq_len, target, dtype)


def check_kept(exact: ExactChoices, recipe: Any, config: dict[str, Any]) -> None:
    """A result can be kept where there is an operator that makes it.

    Raises:
        ConflictError: blocks that should keep their attention have it in many operators.
    """
    wanted = [i for i, word in exact.kept().items() if word == "attention"]
    if not wanted:
        return
    whole = keeps_attention(recipe, config, target_device())
    without = [i for i in wanted if i < len(whole) and not whole[i]]
    if without:
        raise ConflictError(
            "exact.keep=attention",
            f"a window or a cap on the scores in block{'s' if len(without) > 1 else ''} {', '.join(map(str, without))}",
            "attention is many operators there, and none of their results is it: everything would be made again",
            ["exact.keep=products: results of all matrix products", "exact.keep=nothing"],
        )
