"""`build`: a recipe and its exact choices become a `Run`, on real tensors or on simulated ones.

The order is always the same: structure, load, adapters, kernels, chunks, recompute, optimizer, gradient delivery.
Nothing below this function knows whether a step is being simulated or executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.activations.chunked_mlp import ChunkedMLP
from skimp.activations.coded import Coded
from skimp.activations.derivative_apply import Derivatives
from skimp.activations.offload import Offload
from skimp.activations.pamm import PAMM
from skimp.activations.recompute import Recompute
from skimp.adapters.handle import Handle
from skimp.core.away import Away
from skimp.core.batch import Batch
from skimp.core.coded_model import encode_model
from skimp.core.errors import ConflictError, ModelError
from skimp.core.events import Events
from skimp.core.exact import ExactChoices
from skimp.core.gradients import Delivery
from skimp.core.memory.tracker import Tracker
from skimp.core.registry import check_together, load
from skimp.core.structure import TESTED_FAMILIES, Structure, read_structure
from skimp.kernels.apply import Fused
from skimp.kernels.sparse_apply import SparseAttention
from skimp.optim.compact import Compact
from skimp.optim.groups import decay_groups, role_groups
from skimp.optim.role import roles
from skimp.run.adapt import adapt, coders, groups_by_rate
from skimp.run.attend import attended, pattern_of
from skimp.run.build_checks import asks_compact, check_blocks, check_exact, check_kept, check_path, check_positions
from skimp.run.coded_base import trained, weight_codec
from skimp.run.head import Head
from skimp.run.layers import check_layers, layer_sampler
from skimp.run.offloaded import offload, states_away
from skimp.run.restarts import restarts
from skimp.run.skeleton import materialise, simulate_tensors, skeleton
from skimp.run.stepping import delivery_of, sink_of, stepper_of
from skimp.run.techniques import rule_name, techniques, uses_fused
from skimp.run.wrapped import chunked_mlps, coded, coded_derivatives, name_blocks, pointed, recomputed
from skimp.steps.first_order import FirstOrder, StepResult
from skimp.steps.layers import LayerSampler

DTYPES = {"fp32": torch.float32, "bf16-mixed": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Run:
    """A built run: one policy model, its optimizer and how gradients reach it.

    Attributes:
        recipe: what was asked.
        exact: what the planner chose.
        model: the policy; its blocks may be wrapped.
        structure: its roles.
        head: hidden states -> loss.
        optimizer: the update rule.
        delivery: after or in backward.
        stepper: the step.
        mlps: the chunked MLPs, None without.
        coded: the blocks that keep tensors in fewer bits, None without.
        recompute: the wrapped blocks, None without.
        fused: the layers that run fused, None without.
        sparse: the attention modules that attend over a pattern, None without.
        adapter: the additions that train in the model's place, None without.
        offload: the blocks whose kept tensors wait elsewhere, None without.
        simulated: its tensors have shapes and no values.
        layers: trains a few blocks at a time, None when all train.
        derivatives: the modules that keep codes for backward, None without.
        compact: the layers that hand over projected gradients, None without.
        pamm: the layers that keep points of their input, None without.
        events: what happens every so many steps.
        notes: sentences on what happened, for the metrics of the step; whoever writes them down takes them away.
    """

    recipe: Any
    exact: ExactChoices
    model: nn.Module
    structure: Structure
    head: Head
    optimizer: Any
    delivery: Delivery
    stepper: FirstOrder
    recompute: Recompute | None
    fused: Fused | None = None
    adapter: Handle | None = None
    offload: Offload | None = None
    simulated: bool = False
    layers: LayerSampler | None = None
    sparse: SparseAttention | None = None
    compact: Compact | None = None
    derivatives: Derivatives | None = None
    events: Events = field(default_factory=Events)
    notes: list[str] = field(default_factory=list)
    mlps: ChunkedMLP | None = None
    coded: Coded | None = None
    pamm: PAMM | None = None

    def step(self, batch: Batch) -> StepResult:
        """One optimizer step over a whole step's rows, cut into micro-batches."""
        with self.due():
            return self.stepper.step(batch.split(self.exact.micro_rows))

    @contextmanager
    def due(self) -> Iterator[None]:
        """Fire the events of the coming step; it is taken inside, at the rate that they leave."""
        index = self.delivery.step_index
        self.events.run(index)
        factor = self.events.lr_factor(index)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        try:
            for group in self.optimizer.param_groups if factor != 1.0 else ():
                group["lr"] *= factor
            yield
            if self.adapter is not None:
                self.adapter.after_step()
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def set_lr(self, lr: float) -> None:
        """Set every group's learning rate for the coming step; a group may have a factor of its own."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, float, int]:
        """Mean loss, token accuracy and the number of tokens; one micro-batch of logit chunks at a time."""
        return self.head.evaluate(batches)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Named parameters of the policy, tied ones once."""
        return iter(self.model.named_parameters())

    def rebuild(self, plan: Any) -> None:
        """Other exact choices on the living run: micro-batch, recompute, chunks, delivery of gradients.

        Weights, optimizer states and the number of steps stay where they are; the rows of a step, hence the
        mathematics, stay what the recipe says. The coming steps are bit-equal to those of a run built that way.
        Gradients are dropped and no tensor is made, so this takes no memory. Call it between two steps.

        Args:
            plan: a `Plan`, or its exact choices alone. The allocator's policy is the process's, not the run's.

        Raises:
            ConflictError, ModelError: as `build`; nothing is changed then.
        """
        exact: ExactChoices = plan if isinstance(plan, ExactChoices) else plan.exact
        check_together(techniques(self.recipe, exact))
        check_exact(exact, self.recipe)
        config: Any = self.model.config
        check_kept(exact, self.recipe, config.to_dict())
        check_blocks(exact, self.structure)
        old = self.delivery
        old.close()
        if self.offload is not None:
            self.offload.remove()
            self.offload = None  # the next one may find no place
        if self.coded is not None:
            self.coded.remove()
        if self.recompute is not None:
            self.recompute.remove()
        if exact.mlp_chunk != self.exact.mlp_chunk:
            if self.mlps is not None:
                self.mlps.remove()
            self.mlps = chunked_mlps(self.model, self.structure, exact)
        self.recompute = recomputed(self.model, self.structure, exact)
        self.coded = coded(self.model, self.structure, self.recipe)
        self.offload = offload(self.model, self.structure, exact, self.recipe, self.simulated)
        if self.coded is not None and self.offload is not None:
            self.coded.then = self.offload.saved
        if exact.states != self.exact.states:
            self.optimizer.keep_states(states_away(exact, self.recipe, self.simulated))
        rule = self.layers or self.optimizer
        self.delivery = delivery_of(self.recipe, exact, old.parameters.items(), rule, old.sinks)
        self.delivery.step_index = old.step_index
        if self.compact is not None:
            self.compact.receive = self.delivery.factors
        self.head.chunk = exact.loss_chunk
        self.head.sink = sink_of(self.delivery)
        self.stepper = stepper_of(self.head, self.delivery, self.layers)
        if self.fused is not None:
            self.fused.accumulate = not exact.in_backward
        self.exact = exact

    def show_to(self, tracker: Tracker, batch: Batch) -> None:
        """Tell a tracker what was there before it: weights, buffers, optimizer states and the batch."""
        tracker.hold((p for _, p in self.parameters()), "weights")
        tracker.hold(self.model.buffers(), "weights")
        if self.adapter is not None:
            tracker.hold(self.adapter.additions(), "adapters")
        away = self.optimizer.away
        for name, _, value in self.optimizer.named_state():
            if isinstance(value, Tensor):
                there = away is not None and away.holds(name)
                tracker.away([value]) if there else tracker.hold([value], "optimizer")
        tracker.hold(batch.tensors(), "batch")

    def close(self) -> None:
        """Remove hooks and wrappers; the model is plain again."""
        self.delivery.close()
        self.head.close()
        if self.offload is not None:
            self.offload.remove()
        if self.optimizer.away is not None:
            self.optimizer.away.close()
        if self.layers is not None:
            self.layers.release()
        if self.coded is not None:
            self.coded.remove()
        if self.recompute is not None:
            self.recompute.remove()
        if self.compact is not None:
            self.compact.remove()
        for part in (self.mlps, self.pamm, self.derivatives, self.fused, self.sparse):
            if part is not None:
                part.remove()


def build(
    recipe: Any,
    exact: ExactChoices,
    config: dict[str, Any],
    *,
    simulate: FakeTensorMode | None = None,
    fill: Callable[[nn.Module], None] | None = None,
) -> Run:
    """Build the run.

    Args:
        recipe: a `Recipe`.
        exact: the exact choices.
        config: content of the model's HF `config.json`.
        simulate: build on simulated tensors of this mode; weights are never created.
        fill: puts weights into the materialised model (needed without `simulate`).

    Raises:
        ModelError: the architecture is unknown, or the sequence is beyond the model's positions.
        ConflictError: exact choices that contradict each other; before any weight is loaded.
    """
    dtype = DTYPES[recipe.precision]
    check_together(techniques(recipe, exact))
    check_exact(exact, recipe)
    check_kept(exact, recipe, config)
    model = skeleton(config, dtype)
    structure = read_structure(model)
    check_positions(recipe, structure)
    check_layers(recipe, structure)
    check_blocks(exact, structure)
    codec = weight_codec(recipe)
    if codec is not None:
        encode_model(model, structure, codec, coders(recipe, model, structure, codec))
    pattern_of(recipe, structure)
    if simulate is not None:
        simulate_tensors(model, dtype, simulate)
    else:
        if fill is None:
            raise ModelError("a run on real tensors", "no weights to fill it", instead="pass fill=...")
        materialise(model, dtype, lambda shape, kind: torch.empty(shape, dtype=kind))
        fill(model)
        if structure.family not in TESTED_FAMILIES:
            check_path(model, structure)
    mode: Any = simulate if simulate is not None else nullcontext()
    with mode:
        return _assemble(recipe, exact, model, structure, simulate is not None)


def _assemble(recipe: Any, exact: ExactChoices, model: nn.Module, structure: Structure, simulated: bool) -> Run:
    adapter = adapt(model, structure, recipe)
    sparse = attended(model, structure, recipe)
    structure = structure if adapter is None else adapter.structure  # whose blocks it has made its own
    fused = None
    if uses_fused(recipe):
        # Held gradients are looked at after the last micro-batch only, so a product may add to them where they lie.
        fused = Fused(model, halves=recipe.exact.kernels == "fused", accumulate=not exact.in_backward)
    if recipe.exact.kernels == "fused" and fused is not None and not fused.norms and not fused.mlps:
        raise ConflictError(
            "exact.kernels=fused",
            f"no norm and no activation that is known in a model of type '{structure.family}'",
            "there is nothing to fuse",
            "exact.kernels=null: fused where it can be",
        )
    derivatives = coded_derivatives(recipe, model, structure, fused)
    pamm = pointed(model, structure, recipe)
    mlps = chunked_mlps(model, structure, exact)
    recompute = recomputed(model, structure, exact)
    fewer_bits = coded(model, structure, recipe)
    away = offload(model, structure, exact, recipe, simulated)
    if fewer_bits is not None and away is not None:
        fewer_bits.then = away.saved
    name_blocks(model, structure)
    named = list(trained(model, recipe))
    away_states = states_away(exact, recipe, simulated)
    optimizer = make_optimizer(recipe, named, model, structure, away_states, adapter)
    weights = {f"{name}.weight" for name in (structure.head, *([structure.embedding] if structure.tied else []))}
    sinks = [name for name, _ in named if name in weights]
    layers = layer_sampler(recipe, exact, model, structure, named, optimizer, simulated)
    delivery = delivery_of(recipe, exact, named, layers or optimizer, sinks)
    head = Head(
        model,
        structure,
        chunk=exact.loss_chunk,
        autocast=recipe.precision == "bf16-mixed",
        label_smoothing=recipe.train.loss.label_smoothing,
        z_loss=recipe.train.loss.z_loss,
        sink=sink_of(delivery),
    )
    if layers is not None:
        layers.forward = head.walk
        layers.begin(0)
    stepper = stepper_of(head, delivery, layers)
    built = (recipe, exact, model, structure, head, optimizer, delivery, stepper, recompute, fused, adapter)
    compact = Compact(model, optimizer, delivery.factors) if asks_compact(recipe) else None
    notes: list[str] = []
    again = restarts(recipe, model, optimizer, simulated, notes.append)
    events = Events(*again, *([] if adapter is None else adapter.events(optimizer)))
    beside: dict[str, Any] = {"layers": layers, "mlps": mlps, "compact": compact, "derivatives": derivatives}
    beside |= {"sparse": sparse, "coded": fewer_bits, "pamm": pamm}
    return Run(*built, offload=away, simulated=simulated, events=events, notes=notes, **beside)


def make_optimizer(
    recipe: Any,
    named: Sequence[tuple[str, nn.Parameter]],
    model: nn.Module,
    structure: Structure,
    away: Away | None = None,
    adapter: Handle | None = None,
) -> Any:
    """The recipe's update rule over its decay groups, cut further by role where the rule treats roles unlike; its
    states live in `away`."""
    rule = load(rule_name(recipe), "update rule")
    options: dict[str, Any] = {"lr": recipe.train.lr, **recipe.optimizer.options()}
    taken = signature(rule).parameters.values()
    if any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in taken):
        options["seed"] = recipe.train.seed
    decay = recipe.train.weight_decay
    groups = role_groups(named, decay, roles(model, structure)) if rule.by_role else decay_groups(named, decay)
    optimizer = rule(groups if adapter is None else groups_by_rate(groups, adapter, recipe.train.lr), **options)
    optimizer.still = adapter.still() if adapter is not None and recipe.adapter.source is None else frozenset()
    if away is not None:
        optimizer.keep_states(away)
    if recipe.train.layers is None:  # else the sampler makes those of the blocks that train
        for _, parameter in named:
            optimizer.init_state(parameter)
    return optimizer
