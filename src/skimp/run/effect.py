"""Did the techniques that were switched on do anything? Checked after the first optimizer step, by name.

Silence is the field's worst bug: a run that looks normal while nothing is trained or nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

from skimp.core.coded_model import assert_coded
from skimp.core.coded_trained import codes_of
from skimp.core.errors import EffectError
from skimp.core.gradients import on_gradient
from skimp.core.read import read
from skimp.run.build import Run
from skimp.run.coded_base import weight_codec

#: Numbers of each parameter that are remembered: small enough to cost nothing, enough to see it move.
SAMPLE = 64
#: A bfloat16 step is drawn at random; with so many moves expected, none at all has a chance of e^-30.
SURELY = 30.0


class Effect:
    """Remembers a little of every parameter before the first step, and watches gradients come and go in it.

    Args:
        run: before its first step.
    """

    def __init__(self, run: Run) -> None:
        parameters = run.delivery.parameters
        self._before = {name: _sample(p) for name, p in parameters.items()}
        self._forwards = run.stepper.forwards
        self._attended = 0 if run.sparse is None else run.sparse.runs
        self._outlived: list[str] = []
        # After the delivery's own hooks: what still has a gradient then is held until backward has ended.
        self._hooks = [
            on_gradient(p, self._watch(name)) for name, p in parameters.items() if name not in run.delivery.sinks
        ]

    def _watch(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._outlived.append(name)

        return arrived

    def remove(self) -> None:
        """Watch no longer; for a first step that broke off."""
        for hook in self._hooks:
            hook.remove()

    def check(self, run: Run, lr: float) -> None:
        """Raise `EffectError` for whatever did nothing.

        Args:
            run: after its first step.
            lr: the learning rate of that step.
        """
        self.remove()
        forwards = run.stepper.forwards - self._forwards
        _micro_batches(run, forwards)
        if run.exact.recompute:
            _recomputed(run, forwards)
        _offloaded(run, forwards)
        _chunked(run, forwards)
        if run.derivatives is not None:
            run.derivatives.assert_effect()
        if run.pamm is not None:
            run.pamm.assert_effect()
        elif run.recipe.activations.pamm is not None:
            raise EffectError(f"activations.pamm={run.recipe.activations.pamm.one_of}", "the layers are not wrapped")
        if run.coded is not None:
            run.coded.assert_effect(None if run.layers is None else run.layers.in_backward)
        elif run.recipe.activations.kept_bits is not None:
            raise EffectError(f"activations.kept_bits={run.recipe.activations.kept_bits}", "the blocks are not wrapped")
        if run.fused is not None and run.recipe.exact.kernels == "fused":
            run.fused.assert_effect()
        if run.sparse is not None:
            run.sparse.assert_effect(run.sparse.runs - self._attended, forwards, run.recipe.data.seq_len)
        if run.exact.in_backward and self._outlived:
            raise EffectError(
                "stepping in backward",
                f"{len(self._outlived)} gradients were held until it had ended, first {self._outlived[0]}",
                "no memory was saved",
            )
        held = [n for n, p in run.delivery.parameters.items() if p.grad is not None]
        held += [n for n, buffer in run.delivery.sinks.items() if buffer is not None]
        if held:
            raise EffectError("gradients freed after the step", f"still held: {', '.join(held[:5])}")
        after = {name: _sample(p) for name, p in run.delivery.parameters.items()}
        _states(run)
        run.optimizer.assert_effect(self._before, after)
        codec = weight_codec(run.recipe)
        if codec is not None:
            assert_coded(run.model, run.structure, codec, () if run.adapter is None else run.adapter.additions())
        if run.adapter is not None:
            _rates(run)
            run.adapter.assert_effect(self._before, after)
        if run.layers is not None:
            run.layers.assert_effect(self._before, after)
        self._moved(run, after, lr)
        self._before.clear()

    def _moved(self, run: Run, after: dict[str, Tensor], lr: float) -> None:
        """Most parameters must have moved: the rule's own check is content with one."""
        what = f"optimizer '{run.recipe.optimizer.name}' moves the parameters"
        # One Adam step moves a weight by about lr; float32 cannot show less than 6e-8 of a weight near 1.
        # The gradient of LoRA's A holds B, which begins at 0: the adapter itself looks at these.
        asleep = frozenset() if run.adapter is None else run.adapter.asleep()
        named = {n: p for n, p in run.delivery.parameters.items() if n not in asleep}
        # Of a weight that moves in a few rows the sample may have missed all: the rule's own check looks at these.
        moves_all = getattr(run.optimizer, "moves_all", lambda p: True)
        whole = [n for n, p in named.items() if p.requires_grad and moves_all(p)]
        coded = [n for n in whole if codes_of(named[n]) is not None]
        _codes_moved(run, coded, self._before, after, lr)
        visible = [n for n in whole if named[n].dtype == torch.float32 and lr > 2e-7 and n not in coded]
        still = [n for n in visible if not _differ(self._before[n], after[n])]
        if visible and len(still) > len(visible) // 2:
            raise EffectError(
                what,
                f"{len(still)} of {len(visible)} did not move, first {still[0]}",
                "no gradient reached them, or the update rule skipped them",
                "check that the model's parameters require gradients",
            )
        halves = [n for n, p in run.delivery.parameters.items() if p.dtype == torch.bfloat16 and p.requires_grad]
        halves = [n for n in halves if n not in coded]
        expected = sum(_expected_moves(self._before[n], lr) for n in halves)
        # A tenth: gradients that are zero (tokens not in the batch) or below Adam's eps move nothing.
        if expected > 10 * SURELY and not any(_differ(self._before[n], after[n]) for n in halves):
            raise EffectError(
                what,
                f"none of {len(halves)} bfloat16 parameters moved; about {expected:.0f} numbers should have",
                "updates below half a unit in the last place are lost without stochastic rounding",
            )


def _rates(run: Run) -> None:
    """Parameters of an adapter that move faster than others do."""
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            name = run.optimizer.name_of(parameter)
            wanted, found = run.adapter.lr_scale(name) if run.adapter else 1.0, group.get("lr_scale", 1.0)
            if wanted != found:
                raise EffectError(f"{wanted:g} times the learning rate for {name}", f"{found:g} times")


def _micro_batches(run: Run, forwards: int) -> None:
    """Rows at once as planned: the number of forwards says so."""
    expected = run.delivery.passes * -(-run.recipe.rows_per_step // run.exact.micro_rows)
    if forwards != expected:
        raise EffectError(
            f"micro-batches of {run.exact.micro_rows} of {run.recipe.rows_per_step} rows",
            f"{forwards} forwards, not {expected}",
            "the peak was planned for that many rows at once",
        )


def _recomputed(run: Run, forwards: int) -> None:
    wanted = [run.structure.blocks[i] for i in run.exact.recompute]
    if run.recompute is None or set(run.recompute.blocks) != set(wanted):
        raise EffectError(f"recompute of {len(wanted)} blocks", "they are not wrapped")
    asked = {run.structure.blocks[i]: word for i, word in run.exact.kept().items()}
    if run.recompute.keep != asked:
        raise EffectError(f"recomputed blocks that keep {sorted({*asked.values()})}", "they keep other results")
    run.recompute.assert_effect(forwards, None if run.layers is None else run.layers.in_backward)


def _chunked(run: Run, forwards: int) -> None:
    chunk = run.exact.mlp_chunk
    if chunk is None:
        return
    if run.mlps is None or run.mlps.chunk != chunk:
        raise EffectError(f"MLPs in chunks of {chunk} tokens", "they are not wrapped")
    run.mlps.assert_effect(forwards)


def _offloaded(run: Run, forwards: int) -> None:
    if run.exact.offload:
        if run.offload is None or run.offload.chosen != run.exact.offload:
            raise EffectError(f"offload of {len(run.exact.offload)} blocks", "they are not wrapped")
        run.offload.assert_effect(forwards, None if run.layers is None else run.layers.in_backward)
    if run.exact.states != "device":
        if run.optimizer.away is None or run.optimizer.away.place != run.exact.states:
            raise EffectError(f"optimizer states on {run.exact.states}", "they are beside their parameters")
        run.optimizer.away.assert_effect()


def _states(run: Run) -> None:
    """Optimizer states take the bytes their rule says: 8-bit states that are float32 save nothing."""
    rule = run.optimizer
    for name, parameter in run.delivery.parameters.items():
        state = rule.state.get(parameter) or {}
        if not state and not parameter.requires_grad:
            continue  # its block rests
        found = sum(v.untyped_storage().nbytes() for v in state.values() if isinstance(v, Tensor))
        planned = rule.bytes_of(parameter)
        if found != planned:
            raise EffectError(
                f"optimizer '{run.recipe.optimizer.name}': {planned:,} bytes of state for {name}",
                f"{found:,} bytes" if state else "no state: it was never given to the rule",
            )


def _codes_moved(run: Run, names: list[str], before: dict[str, Tensor], after: dict[str, Tensor], lr: float) -> None:
    """Codes are drawn at random: a move of lr steps one on with probability lr / step."""
    expected = 0.0
    for name in names:
        parameter = run.delivery.parameters[name]
        module = codes_of(parameter)
        assert module is not None
        rate = lr * float(run.optimizer.group_of(parameter).get("scale", 1.0))
        step = read(module.parts()["scale"].amax(), expect=1.0)
        expected += len(before[name]) * min(1.0, rate / step) if step > 0 else 0.0
    if expected > 10 * SURELY and not any(_differ(before[n], after[n]) for n in names):
        raise EffectError(
            f"optimizer '{run.recipe.optimizer.name}' moves weights kept in codes",
            f"none of {len(names)} matrices moved; about {expected:.0f} codes should have",
            "moves smaller than a step between levels are lost unless they are rounded at random",
        )


def _expected_moves(before: Tensor, lr: float) -> float:
    """Numbers of a bfloat16 sample that a step of `lr` moves on average when rounded at random.

    A number in [2^e, 2^(e+1)) has steps of 2^(e-7); a change of lr becomes one with probability lr / 2^(e-7).
    """
    spacing = torch.exp2(torch.floor(torch.log2(before.float().abs().clamp_min(1e-30))) - 7)
    return read((lr / spacing).clamp_max(1.0).sum(), expect=0.0)


def _sample(parameter: Tensor) -> Tensor:
    """Numbers of all columns in turn: a rule that moves some columns only would else go unseen."""
    module = codes_of(parameter)
    held = parameter.detach() if module is None else module.parts()["codes"]
    flat = held.reshape(-1)
    step = max(1, flat.numel() // SAMPLE)
    while step > 1 and gcd(step, held.shape[-1]) > 1:
        step -= 1
    return flat[::step][:SAMPLE].clone()


def _differ(before: Tensor, after: Tensor) -> bool:
    return read((before != after).any(), expect=1.0) != 0.0
