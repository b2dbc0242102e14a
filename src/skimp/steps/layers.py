"""Layer-sampled training: a few blocks train at a time, all others rest, and every `every` steps others are drawn.

Gradients exist for the active blocks alone. Moments of a block that leaves are dropped (or kept, if asked), those of
one that enters begin at zero with a step count of zero, so optimizer state is as large after the hundredth switch as
before the first. Resting blocks keep nothing that only a weight's gradient needs; with a frozen embedding, backward
ends at the lowest active block and everything below it keeps nothing at all.

LISA: Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient LLM Fine-Tuning", 2024, arXiv 2403.17919,
algorithm 1. OwLore: Li et al., 2024, arXiv 2405.18380, section 3. BAdam: Luo et al., 2024, arXiv 2404.02827,
algorithm 1. The released code of LISA never drops states, so its memory creeps up to that of full training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.memory.tracker import scope
from skimp.core.read import read
from skimp.core.structure import Structure
from skimp.steps.draws import Draw, Fixed

Policy = Literal["drop", "keep"]


class LayerSampler:
    """Freezes and thaws the blocks of a model around any optimizer; also outside skimp's loop.

    Args:
        named: (name, parameter) of everything that trains at some time; all of it belongs to `optimizer`.
        structure: the model's roles (`read_structure(model)`).
        optimizer: a skimp update rule, or any `torch.optim.Optimizer` with state by parameter.
        draw: which blocks train in a period; None until `score` has told the weights.
        every: optimizer steps of a period.
        on_switch: drop: moments of a block that leaves are given back, and it begins anew when it returns. keep: the
            moments of all blocks exist from the start and age while a block rests; memory of states is not saved.
        warmup: steps over which a block that enters goes from lr / (warmup + 1) to lr. Its moments are fresh, and
            Adam's first steps move every weight by lr whatever the gradient. Blocks of the first period have none:
            that is the schedule's own warm-up. Needs `step_parameter` to be what updates.
        embeddings, head: whether what lies outside the blocks trains always (else never): the embeddings; the output
            head with the final norm. Tied, they are one matrix.
        score: called once before the first step with its batches, where `draw` is None; returns the draw.
        provisional: blocks that train until then; it is the costliest set, so that memory is flat.

    Raises:
        ConflictError: a tied matrix that should both train and rest, or nothing at all that trains.

    Example:
        >>> sampler = LayerSampler(list(model.named_parameters()), read_structure(model), optimizer,
        ...                        Uniform(seed=0, count=12, active=2), every=20)
        >>> for step, batch in enumerate(batches):
        ...     sampler.begin(step)
        ...     model(**batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        structure: Structure,
        optimizer: Any,
        draw: Draw | None,
        *,
        every: int,
        on_switch: Policy = "drop",
        warmup: int = 0,
        embeddings: bool = True,
        head: bool = True,
        score: Callable[[Sequence[Any]], tuple[Draw, list[float]]] | None = None,
        provisional: tuple[int, ...] = (),
        name: str = "lisa",
    ) -> None:
        if structure.tied and embeddings != head:
            raise ConflictError(
                f"train.layers: embeddings {str(embeddings).lower()} and head {str(head).lower()}",
                "a model whose output head is its embedding",
                "one matrix cannot both train and rest",
                ["embeddings: true, head: true", "embeddings: false, head: false"],
            )
        self.name, self.optimizer, self.every = name, optimizer, every
        self.on_switch, self.warmup = on_switch, warmup
        self.draw, self._score, self._provisional = draw, score, provisional
        self.scores: list[float] = []
        self.blocks: list[dict[str, nn.Parameter]] = [{} for _ in structure.blocks]
        self.always: dict[str, nn.Parameter] = {}
        self.resting: dict[str, nn.Parameter] = {}
        for key, parameter in named:
            index = structure.block_of(key)
            if index is not None:
                self.blocks[index][key] = parameter
            else:
                trains = head if _at_head(key, parameter, structure) else embeddings
                (self.always if trains else self.resting)[key] = parameter
        #: something below the blocks trains, so backward goes through all of them.
        self.through = any(not _at_head(key, p, structure) for key, p in self.always.items())
        self._names = structure.blocks
        #: runs the model on a batch, for `score`; and the sets that a simulation goes through, one a step.
        self.forward: Callable[[Any], Any] = _no_model
        self.sets: tuple[tuple[int, ...], ...] = ()
        self.active: tuple[int, ...] | None = None
        self._factors: dict[Tensor, float] = {}

    # ---- which blocks

    def begin(self, step: int, batches: Sequence[Any] = ()) -> None:
        """Bring the model to the set of optimizer step `step`, counted from 0; before its first forward.

        A second call for the same step changes nothing, so a step that broke off can be taken again.
        """
        if self.draw is None and batches and self._score is not None:
            self.draw, self.scores = self._score(batches)
        draw = self.draw or Fixed((self._provisional,))
        # A simulation meets every set of its list, whatever the period.
        period = step if isinstance(draw, Fixed) else step // self.every
        if self._drawn != (draw, period):
            self._drawn = (draw, period)
            self._switch(draw.at(period))
        self._warm(draw, period, step)

    _drawn: tuple[Draw, int] | None = None

    def _switch(self, active: tuple[int, ...]) -> None:
        if active == self.active:
            return
        self.active = active
        rest = [i for i in range(len(self.blocks)) if i not in active]
        for parameter in self._parameters(rest, self.resting):
            parameter.requires_grad_(False)
            parameter.grad = None
        if self.on_switch == "drop":
            self._forget(rest)  # before anything new is made: what leaves makes room for what enters
        awake = range(len(self.blocks)) if self.on_switch == "keep" else active
        for parameter in self._parameters(active, self.always):
            parameter.requires_grad_(True)
        make = getattr(self.optimizer, "init_state", None)
        if make is not None:
            for parameter in self._parameters(awake, self.always):
                with torch.no_grad(), scope("optimizer", "optimizer"):
                    make(parameter)

    def _forget(self, indices: Iterable[int]) -> None:
        for parameter in self._parameters(indices, self.resting):
            self.optimizer.state.pop(parameter, None)

    def _parameters(self, indices: Iterable[int], beside: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        return [p for i in indices for p in self.blocks[i].values()] + list(beside.values())

    def release(self) -> None:
        """Everything trains again."""
        for parameter in self._parameters(range(len(self.blocks)), {**self.always, **self.resting}):
            parameter.requires_grad_(True)
        self.active = self._drawn = None

    @property
    def in_backward(self) -> tuple[str, ...]:
        """Names of the blocks that backward goes through."""
        lowest = 0 if self.through else min(self.active or (0,))
        return self._names[lowest:]

    # ---- warm-up of a block that enters

    def _warm(self, draw: Draw, period: int, step: int) -> None:
        self._factors.clear()
        if not self.warmup or isinstance(draw, Fixed):
            return
        for index in draw.at(period):
            first = period
            while first > 0 and index in draw.at(first - 1):
                first -= 1
            age = step - first * self.every
            if first > 0 and age < self.warmup:
                self._factors |= dict.fromkeys(self.blocks[index].values(), (age + 1) / (self.warmup + 1))

    # ---- the update rule, as a gradient's delivery calls it

    def step_parameter(self, parameter: Tensor, grad: Tensor | None = None) -> None:
        """The optimizer's own, at the learning rate of a block that warms up.

        Raises:
            SkimpError: the parameter rests.
        """
        with self._at_its_rate(parameter):
            self.optimizer.step_parameter(parameter, grad)

    def together(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """The optimizer's own batches; one by one while a block warms up, as a batch has one rate."""
        batches = getattr(self.optimizer, "together", None)
        return [[p] for p in parameters] if batches is None or self._factors else batches(parameters)

    def step_parameters(self, items: Sequence[tuple[Tensor, Tensor]]) -> None:
        """The optimizer's own, of a batch of `together`."""
        self.optimizer.step_parameters(items)

    @property
    def adds_up(self) -> bool:
        """Whether the optimizer adds up micro-batches."""
        return bool(getattr(self.optimizer, "adds_up", False))

    def add_gradient(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """The optimizer's own: one micro-batch's gradient, added up in the small space."""
        added: Tensor = self.optimizer.add_gradient(parameter, grad)
        return added

    def add_factors(self, parameter: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The optimizer's own: one micro-batch's gradient as leftᵀ·right."""
        added: Tensor = self.optimizer.add_factors(parameter, left, right)
        return added

    def step_added(self, parameter: Tensor) -> None:
        """The optimizer's own, at the learning rate of a block that warms up."""
        with self._at_its_rate(parameter):
            self.optimizer.step_added(parameter)

    def drop_added(self) -> None:
        """The optimizer's own."""
        self.optimizer.drop_added()

    @contextmanager
    def _at_its_rate(self, parameter: Tensor) -> Iterator[None]:
        if not parameter.requires_grad:
            raise SkimpError(
                f"an update of '{self.optimizer.name_of(parameter)}'",
                "its block rests",
                "it has no moments, and what rests must not move",
            )
        factor = self._factors.get(parameter, 1.0)
        if factor == 1.0:
            yield
            return
        group = self.optimizer.group_of(parameter)
        full = group["lr"]
        group["lr"] = full * factor
        try:
            yield
        finally:
            group["lr"] = full

    # ---- what a checkpoint holds, and what an effect is

    def state_dict(self) -> dict[str, Any]:
        """Plain values. The set of a step follows from the seed; only measured scores cannot be had again."""
        return {"name": self.name, "scores": list(self.scores)}

    def load_state_dict(self, state: Mapping[str, Any], draw: Callable[[list[float]], Draw] | None = None) -> None:
        """What `state_dict` gave; states of the optimizer are loaded beside it, and `begin` thaws what is due."""
        if state["scores"] and draw is not None:
            self.scores = list(state["scores"])
            self.draw = draw(self.scores)
        self.active = self._drawn = None

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Hold the first step to its promise.

        Args:
            before, after: the same named parameters (any sample of their numbers) around one step.

        Raises:
            EffectError: a resting parameter moved, holds moments that were to be dropped, or may have a gradient; or
                no block rests although some should.
        """
        what = f"'{self.name}' trains blocks {list(self.active or ())} of {len(self.blocks)}"
        rest = [i for i in range(len(self.blocks)) if i not in (self.active or ())]
        asleep = {k: p for i in rest for k, p in self.blocks[i].items()} | self.resting
        for key, parameter in asleep.items():
            if parameter.requires_grad:
                raise EffectError(what, f"{key} still asks for a gradient", "no memory was saved")
            if self.on_switch == "drop" and self.optimizer.state.get(parameter):
                raise EffectError(what, f"the optimizer holds moments of {key}, which rests", "no memory was saved")
            if key in before and read((before[key] != after[key]).any(), expect=0.0):
                raise EffectError(what, f"{key} moved while its block rests", "it is not layer-sampled training then")
        awake = [k for i in self.active or () for k in self.blocks[i]]
        if awake and not any(k in before and read((before[k] != after[k]).any(), expect=1.0) for k in awake):
            raise EffectError(what, "none of their parameters moved", "no gradient reached them")


def _no_model(batch: Any) -> None:
    raise SkimpError("a forward pass to score the blocks", "no model was given", instead="set sampler.forward")


def _at_head(name: str, parameter: nn.Parameter, structure: Structure) -> bool:
    """The output head and the final norm; all else outside the blocks (embeddings, input projections) is below them."""
    own = name.startswith(structure.head + ".") and not structure.tied
    return own or (parameter.dim() == 1 and not name.startswith(structure.embedding + "."))
