"""Delivery of *final* gradients to an update rule: after backward, or inside it with each gradient freed at once.

Both deliver what the optimizer should see: summed over the micro-batches of the step and clipped by the global
norm. Held after backward, the gradients of all parameters exist together (4 bytes a parameter in float32). In
backward, a parameter is updated as soon as its gradient is final, so that one layer's gradients exist at a time.
The global norm is then not known before the last gradient is gone, so clipping runs two passes: the first only
measures, the second updates; exact, for about 1.7 times the time.

A *sink* is a weight whose gradient is written in place by the loss head (and by a tied embedding) instead of being
returned to autograd: no second vocabulary-sized buffer ever exists. Sinks are delivered when backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from skimp.core.errors import ConflictError, NonFiniteError
from skimp.core.memory.tracker import at, classify, scope
from skimp.core.read import read
from skimp.core.rules import OneByOne, finite, l2_norm


@dataclass(frozen=True)
class Delivered:
    """What one optimizer step saw: the global norm before clipping, and the factor applied to every gradient."""

    norm: float
    scale: float


class Delivery:
    """Common part: the parameters in a fixed order, their sinks and the norm.

    Args:
        parameters: (name, parameter) of everything trained, tied ones once.
        rule: the update rule.
        clip: the largest global L2 norm, or None.
        sinks: names of parameters whose gradients the loss head writes in place.
    """

    #: how often the micro-batches of a step must be run forward and backward.
    passes = 1

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        rule: OneByOne,
        clip: float | None,
        sinks: Iterable[str] = (),
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(parameters)
        self.rule = rule
        self.clip = clip
        self.sinks: dict[str, Tensor | None] = {name: None for name in sinks if name in self.parameters}
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        #: what a rule that `AddsUp` keeps of the present step's gradients, by name.
        self._sums: dict[str, Tensor] = {}
        self.step_index = 0
        #: an update of the present step has begun and the last one has not ended: some parameters are a step ahead.
        self.midway = False

    def sink(self, name: str) -> Tensor | None:
        """The buffer a loss head adds this weight's gradient into, zeroed at first use in a step; None if frozen."""
        if name not in self.sinks or not self.parameters[name].requires_grad:
            return None
        buffer = self.sinks[name]
        if buffer is None:
            parameter = self.parameters[name]
            # Chunks of a bfloat16 head add up in float32: bfloat16 sums lose more with every chunk.
            wide = torch.promote_types(parameter.dtype, torch.float32)
            with scope("gradients"):
                buffer = torch.zeros(parameter.shape, dtype=wide, device=parameter.device)
            self.sinks[name] = buffer
        return buffer

    def begin(self, pass_index: int, micro_batches: int = 1) -> None:
        """Before the first of so many micro-batches of a pass."""
        self._drop_sums()  # of a step that was not ended

    def factors(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """One micro-batch's gradient of `parameter` as leftᵀ·right, (t, m) and (t, n): the rule keeps what it needs.

        Never with `clip`: the global norm is one of whole gradients.
        """
        raise NotImplementedError

    def _keep(self, name: str, left: Tensor, right: Tensor) -> None:
        rule: Any = self.rule
        at(name)
        with torch.no_grad(), scope("gradients", owner=name):
            self._sums[name] = rule.add_factors(self.parameters[name], left, right)

    def _move(self, name: str) -> None:
        """Update a parameter with the sum of its gradients."""
        rule: Any = self.rule
        self.midway = True
        with scope("optimizer", "optimizer", name):
            rule.step_added(self.parameters[name])

    def _drop_sums(self) -> None:
        if self._sums:
            adding: Any = self.rule
            adding.drop_added()
            self._sums.clear()

    def end(self, pass_index: int) -> Delivered | None:
        """After the last micro-batch of a pass; the last pass returns what was delivered."""
        raise NotImplementedError

    def discard(self) -> None:
        """Drop every gradient of a step that broke off, so that the step can be taken again.

        What has moved stays moved: after `midway` the parameters and states must be loaded again first.
        """
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name in self.sinks:
                self.sinks[name] = None
        self._drop_sums()
        self.midway = False

    def close(self) -> None:
        """Remove hooks and drop gradients."""
        self.discard()

    def _apply(self, name: str, grad: Tensor, scale: float) -> None:
        self.midway = True  # before the update: one that breaks off has changed something
        if scale != 1.0:
            grad.mul_(scale)
        with scope("optimizer", "optimizer", name):
            self.rule.step_parameter(self.parameters[name], grad)

    def _total(self, norms: Mapping[str, Tensor]) -> float:
        """The global norm from the per-parameter ones, in the parameters' order whatever order they came in.

        Raises:
            NonFiniteError: names the step and the first parameter whose gradient is NaN or infinite.
        """
        ordered = [norms[name] for name in self.parameters if name in norms]
        total = read(torch.linalg.vector_norm(torch.stack(ordered)), expect=1e30) if ordered else 0.0
        if not finite(total):
            bad = next(
                (n for n in self.parameters if n in norms and not finite(read(norms[n], expect=0.0))), "their sum"
            )
            raise NonFiniteError(
                f"finite gradients in optimizer step {self.step_index + 1}",
                f"the gradient of {bad} is {total}",
                "one update with it would destroy the weights",
                "lower the learning rate, lengthen the warm-up, or set train.clip",
            )
        return total

    def _factor(self, norm: float) -> float:
        """torch's rule: clip / (norm + 1e-6), never above 1."""
        return 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))


class AfterBackward(Delivery):
    """Gradients accumulate in `.grad` over the micro-batches, are clipped together and given to the rule one by one.

    Each is freed as soon as its parameter has moved.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        rule: OneByOne,
        clip: float | None,
        sinks: Iterable[str] = (),
    ) -> None:
        super().__init__(parameters, rule, clip, sinks)
        self._hooks = [
            on_gradient(p, _classify_gradient) for name, p in self.parameters.items() if name not in self.sinks
        ]

    def factors(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        self._keep(self._names[id(parameter)], left, right)

    def end(self, pass_index: int) -> Delivered:
        grads: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            grad = self.sinks.get(name, parameter.grad)
            if grad is not None:
                grads[name] = grad
        with torch.no_grad(), scope("workspace", "clip"):
            norm = self._total({name: l2_norm(grad) for name, grad in (grads | self._sums).items()})
            scale = self._factor(norm)
            for names in self._batches(list(grads)):
                self._apply_all(names, [grads.pop(name) for name in names], scale)
                for name in names:
                    self.parameters[name].grad = None
                    if name in self.sinks:
                        self.sinks[name] = None
            while self._sums:
                self._move(self._sums.popitem()[0])
        self.step_index += 1
        self.midway = False
        return Delivered(norm, scale)

    def _batches(self, names: list[str]) -> list[list[str]]:
        """Names in the batches in which the rule updates them best."""
        together = getattr(self.rule, "together", None)
        if together is None:
            return [[name] for name in names]
        name_of = {id(self.parameters[name]): name for name in names}
        return [[name_of[id(p)] for p in batch] for batch in together([self.parameters[name] for name in names])]

    def _apply_all(self, names: list[str], grads: list[Tensor], scale: float) -> None:
        if len(names) == 1:
            self._apply(names[0], grads.pop(), scale)
            return
        self.midway = True
        if scale != 1.0:
            for grad in grads:
                grad.mul_(scale)
        stepped: Any = self.rule
        with scope("optimizer", "optimizer", names[0]):
            stepped.step_parameters([(self.parameters[n], g) for n, g in zip(names, grads, strict=True)])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()


class InBackward(Delivery):
    """Each parameter is updated inside backward and its gradient freed.

    One micro-batch a step: a gradient that is still to be added to cannot be final. One update per parameter and
    step is asserted. With `clip`, pass 0 measures the norm and pass 1 updates.

    A rule that `AddsUp` takes several micro-batches: each gradient is given to it and freed, and the last moves the
    parameter. The norm is then that of the sums as the rule keeps them, and there is no clipping: the norm of the whole
    gradients is one of tensors that never exist. A parameter that some micro-batches do not touch moves when the last
    has ended.

    Attributes:
        micro_batches: of the present step, for a rule that adds them up; each gives a parameter one gradient at most.
    """

    micro_batches = 1

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        rule: OneByOne,
        clip: float | None,
        sinks: Iterable[str] = (),
    ) -> None:
        super().__init__(parameters, rule, clip, sinks)
        self._added: dict[str, int] = {}
        self.passes = 1 if clip is None else 2
        self._norms: dict[str, Tensor] = {}
        self._known: Delivered | None = None
        self._pass = 0
        self._seen: set[str] = set()
        self._hooks = [
            on_gradient(p, self._hook(name)) for name, p in self.parameters.items() if name not in self.sinks
        ]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            grad = parameter.grad
            parameter.grad = None
            if grad is None:  # autograd calls this too where the gradient went as `factors`
                return
            classify([grad], "gradients")
            at(name)
            (self._arrive if self.micro_batches == 1 else self._add)(name, grad)

        return arrived

    def _add(self, name: str, grad: Tensor) -> None:
        """One of several gradients of a parameter; the last updates it."""
        self._refuse_moved(name)
        rule: Any = self.rule
        with torch.no_grad(), scope("gradients", owner=name):
            self._sums[name] = rule.add_gradient(self.parameters[name], grad)
        self._count(name)

    def factors(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        name = self._names[id(parameter)]
        self._refuse_moved(name)
        self._keep(name, left, right)
        self._count(name)

    def _count(self, name: str) -> None:
        self._added[name] = self._added.get(name, 0) + 1
        if self._added[name] == self.micro_batches:
            self._step_added(name)

    def _step_added(self, name: str) -> None:
        """Update a parameter with the sum of its gradients."""
        self._seen.add(name)
        with torch.no_grad():
            with scope("workspace", "optimizer"):  # once a step, as the update is
                self._norms[name] = l2_norm(self._sums.pop(name))
            self._move(name)

    def _refuse_moved(self, name: str) -> None:
        if name in self._seen:
            raise ConflictError(
                "step-in-backward with one final gradient per parameter",
                f"a second gradient for {name} in optimizer step {self.step_index + 1}",
                "the parameter had already moved when this gradient came",
                "run the whole step as one micro-batch, or set exact.in_backward=false",
            )

    def _arrive(self, name: str, grad: Tensor) -> None:
        self._refuse_moved(name)
        self._seen.add(name)
        with torch.no_grad():
            if self._pass == 0:
                with scope("workspace"):
                    self._norms[name] = l2_norm(grad)
            if self._pass == self.passes - 1:
                self._apply(name, grad, self._known.scale if self._known else 1.0)

    @property
    def seen(self) -> frozenset[str]:
        """Names whose gradient has arrived in the present pass, or did in the last one."""
        return frozenset(self._seen)

    def begin(self, pass_index: int, micro_batches: int = 1) -> None:
        super().begin(pass_index, micro_batches)
        adds = self.passes == 1 and getattr(self.rule, "adds_up", False)
        self._pass, self.micro_batches = pass_index, micro_batches if adds else 1
        self._seen.clear()
        self._added.clear()
        if pass_index == 0:
            self._norms.clear()  # of a step that was not ended
            self._known = None

    def end(self, pass_index: int) -> Delivered | None:
        for name in list(self._sums):  # some micro-batches did not touch these
            self._step_added(name)
        for name, buffer in self.sinks.items():
            if buffer is not None:
                self._arrive(name, buffer)
                self.sinks[name] = None
                del buffer
        if pass_index == 0:
            with torch.no_grad(), scope("workspace", "clip"):
                norm = self._total(self._norms)
            self._norms.clear()
            self._known = Delivered(norm, self._factor(norm))
        if pass_index < self.passes - 1:
            return None
        self.step_index += 1
        self.midway = False
        return self._known

    def discard(self) -> None:
        super().discard()
        for kept in (self._norms, self._seen, self._added):
            kept.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()


def on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` when the parameter's gradient is accumulated; also one that rests just now may be given.

    torch takes no such hook for a parameter that needs no gradient, and keeps those it has when that changes.
    """
    rests = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(hook)
    finally:
        if rests:
            parameter.requires_grad_(False)


def _classify_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        classify([parameter.grad], "gradients")
