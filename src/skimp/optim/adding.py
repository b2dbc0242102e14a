"""Micro-batches of a projected rule, added up as the rule needs them: r × b numbers of a matrix, not a × b.

The projection is linear, so between changes of basis the sum of the parts is the projection of the sum. A basis that is
due is that of the step's first micro-batch. What is added up lives within one optimizer step and is in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.coded_trained import codes_of
from skimp.core.errors import SkimpError
from skimp.core.sharded import Part
from skimp.optim import codes, elsewhere
from skimp.optim.chosen import Chosen
from skimp.optim.plain import plain_step
from skimp.optim.stages import Place


class Adding(Chosen):
    """What a rule that projects offers to a delivery in backward, and to layers with compact gradients."""

    #: its bases are made of gradients, those of a step's first micro-batch where gradients are compact.
    bases_of_gradients: ClassVar[bool] = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._added: dict[Tensor, Tensor] = {}
        #: names of the weights whose gradients are to arrive as factors (`skimp.optim.compact`), and of those that did.
        self.compact: frozenset[str] = frozenset()
        self.factored: set[str] = set()
        #: names of parameters whose first gradient is known to be 0, before they have seen one.
        self.still: frozenset[str] = frozenset()
        super().__init__(params, defaults)

    def _waits(self, place: Place) -> bool:
        """Whether a first basis waits for the second gradient: once, whatever becomes of the state's own count of
        steps. Known before and not read, so that a simulation does as a run does."""
        waits = place.name in self.still
        self.still -= {place.name}
        return waits

    @torch.no_grad()
    def load_named_state(self, saved: Any, only: Any = None) -> None:
        """As every rule's; what was saved has begun."""
        super().load_named_state(saved, only)
        self.still = frozenset()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every rule's; what was saved has begun."""
        super().load_state_dict(state_dict)
        self.still = frozenset()

    # ---- what the rule gives

    def _due(self, state: dict[str, Any], place: Place) -> bool:
        """Whether this step has a new basis."""
        raise NotImplementedError

    def _refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor | None:
        """Make it."""
        raise NotImplementedError

    def _write(
        self, p: Tensor, r: Tensor | None, g: Tensor | None, state: dict[str, Any], place: Place, part: Part
    ) -> None:
        """Move `p` by its projected gradient `r`; None where there is no basis yet, and p only decays."""
        raise NotImplementedError

    def _place_of(self, p: Tensor, name: str, step: int) -> Place:
        if p not in self._where:  # a copy beside states that live elsewhere
            p = next(q for q in self.parameters() if self.name_of(q) == name)
        rank = self.rank_of(p)
        assert rank is not None
        return Place(name, step, rank, *self.sides(p), self.group_of(p))

    def _seen(self, p: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `p` with the projected side first, in the dtype of the arithmetic."""
        return (grad.t() if self.turned(p) else grad).to(torch.promote_types(grad.dtype, torch.float32))

    def _whole_step(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        """Move a parameter that is not projected."""
        plain_step(self.rule, p, grad, state, group, part)

    @torch.no_grad()
    def add_gradient(self, p: Tensor, grad: Tensor) -> Tensor:
        """Keep Pᵀ·G of one micro-batch's gradient (of a parameter that stays whole: all of it); returns the sum so far.

        A basis that is due is that of the step's first micro-batch. Each further one costs r·b numbers, not a·b.
        """
        name, state = self.name_of(p), self.init_state(p)
        with elsewhere.at_hand(self, p):
            if "since" not in state:
                kept = grad
            else:
                place, g = self._place_of(p, name, state["step"] + 1), self._seen(p, grad)
                if p not in self._added and self._due(state, place):
                    state["step"] += 1  # as `update` has it; a gradient that is not finite takes it back
                    self._refresh(g, state, place)
                    state["step"] -= 1
                kept = self.stages.projector.project(g, state, place)
        held = self._added.get(p)
        if held is None:
            held = self._added[p] = kept.clone() if kept is grad else kept
        else:
            held.add_(kept)
        return held

    @torch.no_grad()
    def add_factors(self, p: Tensor, dy: Tensor, x: Tensor) -> Tensor:
        """`add_gradient` of G = dyᵀ·x, (t, m) and (t, n), which is formed for a basis that is due and else never."""
        name, state = self.name_of(p), self.init_state(p)
        self.factored.add(name)
        place = self._place_of(p, name, state["step"] + 1)
        if p not in self._added and self._due(state, place):
            return self.add_gradient(p, torch.mm(dy.t(), x))
        work = torch.promote_types(p.dtype, torch.float32)
        left, right = (x, dy) if self.turned(p) else (dy, x)
        with elsewhere.at_hand(self, p):
            kept = self.stages.projector.project_factors(left.to(work), right.to(work), state, place)
        held = self._added.get(p)
        self._added[p] = kept if held is None else held.add_(kept)
        return self._added[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As every rule's; parameters whose gradients were added up move too."""
        loss = super().step(closure)
        for p in list(self._added):
            self.step_added(p)
        return loss

    @torch.no_grad()
    def step_added(self, p: Tensor) -> None:
        """Update `p` with what was added, which is dropped."""
        held, name, state = self._added.pop(p), self.name_of(p), self.init_state(p)
        state["step"] += 1
        part = Part(name, p.numel(), 0, name)
        with elsewhere.at_hand(self, p), codes.numbers(self, p, state) as w:
            if "since" not in state:
                self._whole_step(w, held, state, self.group_of(p), part)
                return
            place = self._place_of(p, name, state["step"])
            self._write(w, held if state["refreshed"] else None, None, state, place, part)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if codes_of(p) is None:
            super()._update(p, grad, group)
            return
        state, name = self.begin_update(p, grad), self.name_of(p)
        with elsewhere.at_hand(self, p), codes.numbers(self, p, state) as w:
            self.update(w, grad.to(w.device).contiguous(), state, group, Part(name, p.numel(), 0, name))

    def drop_added(self) -> None:
        """Forget what was added."""
        self._added.clear()


def check_adds_up(rule: Any) -> None:
    """Refuse a rule that needs more of a gradient than its projection.

    Raises:
        SkimpError: names the rules that do not.
    """
    if not getattr(rule, "adds_up", False):
        raise SkimpError(
            f"compact gradients for {rule.rule}",
            "it uses the whole gradient beside its projection",
            "what is never formed cannot be added, scaled or fed back",
            "galore, galore2, q-galore, natural-galore, grass or compact",
        )
