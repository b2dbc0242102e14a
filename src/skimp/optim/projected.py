"""The projected family: one pipeline over chosen matrices, AdamW in place for everything else.

Which matrices: those between hidden states (attention and MLP), by the role of their group where it has one
(`skimp.optim.role_groups`; a run makes them), else every parameter with two dimensions whose name says nothing of an
embedding or a head. A matrix of which the rank would save nothing stays whole, and the table says so; when that holds
for all of them the rule is refused. Parameters of one or of three and more dimensions stay whole; fused projections
are one matrix. The shorter side is projected.

A basis is made at the parameter's first step and then every `refresh` steps, each parameter at another step of the
period so that no step pays for all. There a gradient of zeros keeps the old basis; one that is not finite stops the
step before anything of this parameter has changed. Between changes nothing is read, so none is refused. Where the first
gradient is known to be 0 (`still`: A of a LoRA whose B begins at 0) the first basis is that of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.bf16 import stochastic_round
from skimp.core.errors import EffectError, NonFiniteError, SkimpError
from skimp.core.read import read
from skimp.core.sharded import Part
from skimp.optim.adding import Adding, check_adds_up
from skimp.optim.options import check_options, lr_of
from skimp.optim.policy import carry_over, check_policy, lengthen
from skimp.optim.stages import Place, Stages


class Projected(Adding):
    """Base of the family: a preset gives `stages`, a dozen lines that read like its paper.

    Args:
        params: parameters, groups or `named_parameters()`; float32, float64, or bf16 with stochastic rounding. A
            group may have a "rank" of its own.
        stages: the composition.
        rank, refresh, scale: directions kept (0: a quarter of each matrix's shorter side), steps between bases, and
            the factor of lifted moves.
        stagger: spread the refreshes over the period.
        rewarm: steps over which a matrix's rate rises again after a change of its basis: moments that are kept were
            measured in the old one. None after a basis of step 1, where the schedule's own warm-up is.
        compact: gradients of projected weights are to arrive as factors; a run puts its layers in `compact.Compact`,
            a loop of one's own goes inside `project_backward`.

    Raises:
        SkimpError: an option out of range; a dtype; no matrix to project; a rank that saves nothing for any.
    """

    def __init__(
        self,
        params: Any,
        stages: Stages,
        *,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        rank: int,
        refresh: int,
        scale: float = 1.0,
        stagger: bool = True,
        rewarm: int = 0,
        seed: int = 0,
        peak_lr: float = 0.0,
        compact: bool = False,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        if rank < 0 or refresh < 1:
            raise SkimpError(f"{self.rule}: rank at least 0, refresh at least 1", f"rank {rank}, refresh {refresh}")
        if not 0 <= rewarm < refresh:
            raise SkimpError(
                f"{self.rule}: rewarm {rewarm}",
                f"a new basis every {refresh} steps",
                "the rate would never be full again",
                f"rewarm {max(0, min(refresh - 1, 10))}",
            )
        check_policy(self.rule, stages)
        if compact:
            check_adds_up(self)
        self.asks_compact = compact
        self.stages = stages
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank}
        defaults |= {"refresh": refresh, "scale": scale, "stagger": stagger, "seed": seed, "peak_lr": peak_lr}
        defaults |= {"rewarm": rewarm}
        super().__init__(params, defaults)
        self._shift: dict[str, float] = {}
        self._check_some()

    # ---- one step

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        if "since" not in state:
            self._whole_step(p, grad, state, group, part)
            return
        place, g = self._place_of(p, part.name, state["step"]), self._seen(p, grad)
        if self.stages.feedback:
            g = g + state["error"]
        lost = self._refresh(g, state, place) if self._due(state, place) else None
        r = self.stages.projector.project(g, state, place) if state["refreshed"] else None
        self._write(p, r, g, state, place, part)
        if lost is not None:
            state["error"].add_(lost)

    def _write(
        self, p: Tensor, r: Tensor | None, g: Tensor | None, state: dict[str, Any], place: Place, part: Part
    ) -> None:
        """Move `p` by its projected gradient `r`; None where there is no basis yet, and p only decays."""
        work, group = torch.promote_types(p.dtype, torch.float32), place.group
        lr, after = lr_of(group) * self._risen(state, place), self.stages.decay_after
        decay = 1.0 - lr * group["weight_decay"]
        target = p if p.dtype == work else p.to(work)
        w = target.t() if self.turned(p) else target
        if r is not None:
            self._move(w, r, g, state, place, lr, 1.0 if after else decay)
        if (after or r is None) and decay != 1.0:  # without a gradient a whole parameter's moments are zero too
            w.mul_(decay)
        if target is not p:
            p.copy_(stochastic_round(target, place.seed, part.address, stream=2 * state["step"]))

    def _move(
        self, w: Tensor, r: Tensor, g: Tensor | None, state: dict[str, Any], place: Place, lr: float, decay: float
    ) -> None:
        stages, group, projector = self.stages, place.group, self.stages.projector
        state["since"] += 1
        for transform in stages.transforms:
            r = transform(r, state, place)
        rate = lr * group["scale"] if stages.post is None else 1.0
        n = stages.inner.move(r, state, rate, state["since"], group, place.name)
        if stages.post is None:
            projector.add_(w, n, state, place, decay)
        else:
            assert g is not None
            delta = stages.post.delta(g, r, n.neg_(), projector, state, place)
            w.mul_(decay).add_(delta, alpha=-lr)
        if stages.feedback:
            assert g is not None
            torch.sub(g, projector.lift(r, state, place), out=state["error"])
        advance = getattr(projector, "advance", None)
        if advance is not None:
            advance(g, r, state, place)

    def _due(self, state: dict[str, Any], place: Place) -> bool:
        period = int(state["gap"] if self.stages.lazy and state["gap"] else place.group["refresh"])
        if not state["refreshed"]:
            return not self._waits(place)
        shift = int(self._shift_of(place.name) * period) if place.group["stagger"] else 0
        # Shifts lie within half a period on either side, so the second basis is never just after the first.
        return (place.step - 1 - shift) % period == 0 and place.step - int(state["refreshed"]) > period // 2

    @staticmethod
    def _risen(state: dict[str, Any], place: Place) -> float:
        """What part of its rate a matrix has, so many steps after a change of basis."""
        steps, age = int(place.group.get("rewarm", 0)), place.step - int(state["refreshed"])
        return (age + 1) / (steps + 1) if state["refreshed"] > 1 and age < steps else 1.0

    def _shift_of(self, name: str) -> float:
        """In [−½, ½): the place of this parameter in the period, evenly in the order of parameters."""
        if name not in self._shift:
            names = [self.name_of(p) for p in self.parameters() if self.rank_of(p) is not None]
            self._shift = {n: (i / len(names) + 0.5) % 1.0 - 0.5 for i, n in enumerate(names)}
        return self._shift[name]

    def _refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor | None:
        """A new basis, and the moments' policy. Returns what a change of basis took from the moments, if that is fed
        back.

        Raises:
            NonFiniteError: the gradient is not finite.
        """
        size = read(torch.linalg.vector_norm(g), expect=1.0)
        if not size < float("inf"):
            state["step"] -= 1  # nothing of this parameter has changed: the step can be taken again
            raise NonFiniteError(
                f"a finite gradient of '{place.name}' for its basis in step {place.step}",
                f"its norm is {size}",
                "a basis of it would be NaN, and every later step with it",
                "lower the learning rate, lengthen the warm-up, or clip the gradient",
            )
        if size == 0.0:
            return None
        projector, first = self.stages.projector, not state["refreshed"]
        held = None if first else projector.basis(state, place)
        old = held.clone() if held is not None else None
        projector.refresh(g, state, place)
        state["refreshed"] = place.step
        for transform in self.stages.transforms:
            transform.reset(state)
        if self.stages.lazy:
            lengthen(old, projector.basis(state, place), state, place)
        return None if first else carry_over(self.stages, old, state, place)

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Beyond what every rule is held to: some basis was made.

        Raises:
            EffectError: no matrix that took a step has one.
        """
        super().assert_effect(before, after)
        stepped = [p for p in self.parameters() if self.state.get(p, {}).get("since", -1) >= 0]
        if not any(self.state[p]["refreshed"] for p in stepped):
            raise EffectError(
                f"'{self.rule}' projects matrices", f"none of {len(stepped)} has a basis", "every gradient was zero"
            )
        if self.asks_compact:
            names = {self.name_of(p) for p in stepped}
            whole = sorted((names & self.compact or names) - self.factored)
            if whole:
                raise EffectError(
                    f"'{self.rule}' with compact gradients",
                    f"{len(whole)} of {len(names)} came whole, first {whole[0]}",
                    "their layers do not run as `project_backward` makes them; no memory was saved",
                )
