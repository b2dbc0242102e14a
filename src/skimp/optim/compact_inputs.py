"""CompAct: the layers keep x·P of their inputs, and their weights' gradients are born projected.

A linear layer y = x·Wᵀ keeps for backward z = x·P (t, r) in the place of x (t, n). The output and the gradients of x
and the bias are exact; the weight's is dYᵀ·z = (dYᵀ·x)·P (m, r), the exact gradient seen through P. Adam runs on that,
and the move goes back by Pᵀ. P (n, r) has entries of variance 1/r, so that E[P·Pᵀ] = 1; it is drawn from its address
(seed, layer, step of the last change) in the forward and again in the step, and is never kept.

Kept for backward, of t tokens: t·r numbers a layer and not t·n; q, k and v read one tensor and keep one z between them,
so do gate and up. What a fused layer can make again from what is kept anyway is projected in backward, and nothing is
kept. States: 2·m·r and not 2·m·n; gradient m·r.

Paper: "CompAct: Compressed Activations for Memory-Efficient LLM Training", Shamshoum et al., 2025 (NAACL), arXiv
2410.15352, algorithms 1 and 2. Different here: eps is added to the root, as the listing has it and the text has not;
moments stay uncorrected, their correction is applied on the way out; noise has an address and leaves torch's generator
alone; layers that read one tensor share P (`share`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.linalg import random_signs
from skimp.core.noise import normal
from skimp.core.sharded import Part, local
from skimp.core.structure import input_name, is_attention_output
from skimp.optim.bases import Gaussian
from skimp.optim.inner import Adam, Codec
from skimp.optim.options import lr_of
from skimp.optim.plain import plain_step
from skimp.optim.policy import carry_over
from skimp.optim.projected import Projected
from skimp.optim.stages import Place, Stages

Draw = Literal["normal", "signs"]


@dataclass(frozen=True)
class Inputs(Gaussian):
    """P for the input side of a layer.

    Attributes:
        share: layers that read one tensor have one P.
        draw: entries N(0, 1/r), or ±1/√r, which cost one bit of noise each; E[P·Pᵀ] = 1 for both.
    """

    share: bool = True
    draw: Draw = "normal"

    def address(self, parameter: str) -> str:
        """The address of the noise of a weight's P."""
        layer = layer_of(parameter)
        return f"{input_name(layer) if self.share else layer}.P"

    def drawn(self, state: Mapping[str, Any], place: Place, like: Tensor) -> Tensor:
        address, stream = self.address(place.name), int(state["refreshed"])
        if self.draw == "signs":
            signs = random_signs(place.rows, place.rank, place.seed, address, stream, like)
            return signs.mul_(place.rank**-0.5)
        numbers = normal(place.seed, address, 0, place.rows * place.rank, stream=stream, device=like.device)
        return numbers.view(place.rows, place.rank).mul_(place.rank**-0.5).to(like.dtype)


class CompAct(Projected):
    """CompAct: layers keep a random projection of their inputs, and gradients and Adam's states live in its space.

    Attention's output projection stays whole: its input is attention's output, which attention keeps anyway. It moves
    at `output_scale` times the rate, since all others move at `scale` times it.

    Args:
        rank: below 1, a part of each layer's inputs; from 1 on, so many directions.
        refresh: steps between draws of P, the same step for all layers.
        output_scale: factor of the rate of attention's output projections.
        share: layers that read one tensor share P, and so keep one z.
        draw: "normal" or "signs".
        policy: at a new P the moments are kept as they are (the paper's listing), or "reset".
        compact: False takes whole gradients, from layers that keep their inputs, and projects them: the same numbers to
            rounding, only the states are small.

    Raises:
        SkimpError: a rank of 0 or below, or one that saves nothing; a policy that needs a basis to turn.
    """

    rule: ClassVar[str] = "compact"
    adds_up: ClassVar[bool] = True
    bases_of_gradients: ClassVar[bool] = False

    def __init__(
        self, params: Any, *, rank: float = 0.25, refresh: int = 50, scale: float = 0.25, output_scale: float = 0.125,
        share: bool = True, draw: Draw = "normal", policy: Literal["keep", "reset"] = "keep", states: Codec = "fp32",
        compact: bool = True, lr: float | Tensor = 1e-2, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        if not rank > 0 or not output_scale > 0:
            raise SkimpError("compact: rank and output_scale above 0", f"rank {rank}, output_scale {output_scale}")
        if policy not in ("keep", "reset"):
            raise SkimpError(
                f"compact: policy {policy}",
                "a random P",
                "two draws have no direction in common to turn the moments by",
                "policy: keep or reset",
            )
        self.output_scale = output_scale
        stages = Stages(Inputs(share, draw), Adam(states), (), None, policy, states=states)
        # All layers change at one step, so that those which share P always do.
        own: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "stagger": False}
        super().__init__(params, stages, **own, rank=rank, refresh=refresh, scale=scale, compact=compact, **options)  # type: ignore[arg-type]

    # ---- which side

    def chosen(self, p: Tensor) -> bool:
        return super().chosen(p) and not is_attention_output(layer_of(self.name_of(p)))

    def turned(self, p: Tensor) -> bool:
        """The inputs are a weight's columns, but for layers that store outputs as columns."""
        if p not in self._where:  # this process's copy of a replicated one: its group is that of the whole
            p = next((q for q in self.parameters() if local(q).data_ptr() == p.data_ptr()), p)
        return not self.group_of(p).get("columns", False)

    def _directions(self, p: Tensor, asked: float) -> int:
        return max(1, round(asked * self.sides(p)[0])) if asked < 1 else int(asked)

    def rule_for(self, p: Tensor) -> str:
        slower = is_attention_output(layer_of(self.name_of(p))) and p.ndim == 2
        return super().rule_for(p) + (f" ({self.output_scale:g} of the rate)" if slower else "")

    # ---- forward and backward

    def small_input(self, p: Tensor, x: Tensor) -> Tensor:
        """z = x·P (t, r) of the coming step, in x's dtype; x is (…, n). Changes nothing: a forward may be run again."""
        place, since = self._coming(p)
        projector: Any = self.stages.projector
        return torch.mm(x.reshape(-1, place.rows), projector.drawn({"refreshed": since}, place, x))

    def projection_of(self, p: Tensor) -> tuple[str, int, int]:
        """What tells the P of the coming step from others: its address, rank and step."""
        place, since = self._coming(p)
        projector: Any = self.stages.projector
        return projector.address(place.name), place.rank, since

    def _coming(self, p: Tensor) -> tuple[Place, int]:
        """Where the coming step is, and the step its P was drawn in, or will be."""
        state = self.init_state(p)
        place = self._place_of(p, self.name_of(p), state["step"] + 1)
        return place, place.step if self._due(state, place) else int(state["refreshed"])

    @torch.no_grad()
    def add_factors(self, p: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        """As every rule's, with z of `small_input` for x: adds dyᵀ·z, (t, m) and (t, r)."""
        name, state = self.name_of(p), self.init_state(p)
        self.factored.add(name)
        place = self._place_of(p, name, state["step"] + 1)
        if self._due(state, place):
            self._refresh(dy, state, place)
        work = torch.promote_types(p.dtype, torch.float32)
        kept = torch.mm(x.to(work).t(), dy.to(work))
        held = self._added.get(p)
        self._added[p] = kept if held is None else held.add_(kept)
        return self._added[p]

    # ---- the step

    def _refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor | None:
        """A new P is due, whatever the gradient: the forward has used it already."""
        first, state["refreshed"] = not state["refreshed"], place.step
        return None if first else carry_over(self.stages, None, state, place)

    def _whole_step(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        if is_attention_output(layer_of(part.name)) and part.name.endswith(".weight"):
            group = {**group, "lr": lr_of(group) * self.output_scale}
        plain_step(self.rule, p, grad, state, group, part)


def layer_of(parameter: str) -> str:
    """The name of the layer that a weight's name is of."""
    return parameter.removesuffix(".weight")
