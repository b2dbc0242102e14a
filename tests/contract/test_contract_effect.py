"""Every technique's effect is checked after the first step, and each check fails when its technique does
nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract_rows import BLOCKS, CELLS, IN_PIECES, TECHNIQUES, Technique, batch_of, make_run

import skimp.activations.chunked_mlp
import skimp.activations.recompute
from skimp.activations.coded import Coded
from skimp.adapters.sst import SST
from skimp.core.attention import OWN
from skimp.core.away import Away
from skimp.core.errors import ConflictError, EffectError
from skimp.core.gradients import AfterBackward, InBackward
from skimp.core.saved import Saved
from skimp.kernels.native import library
from skimp.optim.base import UpdateRule
from skimp.run.build import Run
from skimp.run.effect import Effect

FAST = [(t, "llama-tied") for t in TECHNIQUES] + [("recompute", "gpt2"), ("in-backward", "gemma2")]
SLOW = [cell for cell in CELLS if cell not in FAST]


@pytest.mark.parametrize("style", IN_PIECES)
def test_keeping_attention_is_refused_where_it_is_no_single_operator(style: str) -> None:
    with pytest.raises(ConflictError, match=r"block.* 0.*\n.*many operators(.|\n)*exact.keep=products"):
        make_run("recompute-but-attention", style)
    living = make_run("recompute", style)
    with pytest.raises(ConflictError, match="many operators"):
        living.rebuild(replace(living.exact, keep="attention"))
    assert living.exact.keep == "nothing"


def first_step(technique: str | Technique, style: str = "llama", disable: Callable[[Run], None] | None = None) -> None:
    run = make_run(technique, style)
    if disable is not None:
        disable(run)
    effect = Effect(run)
    run.step(batch_of(technique))
    effect.check(run, 1e-3)


@pytest.mark.parametrize(("technique", "style"), FAST)
def test_took_effect(technique: str, style: str) -> None:
    first_step(technique, style)


@pytest.mark.slow
@pytest.mark.parametrize(("technique", "style"), SLOW)
def test_took_effect_in_the_whole_table(technique: str, style: str) -> None:
    first_step(technique, style)


def test_mutation_recompute_that_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(run: Any, *args: Any, use_reentrant: bool, preserve_rng_state: bool, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    monkeypatch.setattr(skimp.activations.recompute, "checkpoint", keep)
    with pytest.raises(EffectError, match=r"not run again in backward.*layers\.0"):
        first_step("recompute")


def test_mutation_recompute_of_some_blocks_that_wraps_none() -> None:
    with pytest.raises(EffectError, match="recompute of 2 blocks"):
        first_step("recompute-some", disable=lambda run: setattr(run, "recompute", None))


@pytest.mark.parametrize("technique", ["plain", "8-bit", "bf16", "in-backward"])
def test_mutation_update_rule_that_moves_nothing(monkeypatch: pytest.MonkeyPatch, technique: str) -> None:
    monkeypatch.setattr(UpdateRule, "step_parameter", lambda self, p, grad=None: None)
    with pytest.raises(EffectError, match=r"optimizer|updates parameters"):
        first_step(technique)


def test_mutation_an_attention_module_that_attends_to_everything() -> None:
    def plain(run: Run) -> None:
        delattr(run.model.get_submodule(f"{run.structure.blocks[1]}.self_attn"), OWN)

    with pytest.raises(EffectError, match="no block was left out"):
        first_step("s2", disable=plain)


def test_models_with_windows_or_caps_of_their_own_keep_their_attention() -> None:
    for style, what in (("mistral", "a window of 7 tokens"), ("gemma2", "a window of 7|a cap of 20")):
        with pytest.raises(ConflictError, match=what):
            first_step("s2", style)


def test_mutation_an_adapted_layer_that_runs_plain() -> None:
    def plain(run: Run) -> None:
        assert run.adapter is not None
        del run.adapter.module(next(iter(run.adapter.modules))).forward

    with pytest.raises(EffectError, match="no gradient reached them"):
        first_step("lora", disable=plain)


@pytest.mark.parametrize("technique", ["lora-galore", "gradnormlorp-galore", "gradnormlorp", "lora-bf16"])
def test_what_an_adapter_says_is_still_has_a_first_gradient_of_zeros(technique: str) -> None:
    """And nothing else has, so that no first basis waits longer than it must; the second gradient is none."""
    run = make_run(technique, "llama")
    assert run.adapter is not None
    rule, update = run.optimizer, run.optimizer.step_parameter
    seen: list[set[str]] = []

    def watched(p: torch.nn.Parameter, grad: torch.Tensor) -> None:
        if not grad.any():
            seen[-1].add(rule.name_of(p))
        update(p, grad)

    rule.step_parameter = watched
    for step in range(2):
        seen.append(set())
        run.step(batch_of(technique, seed=step))
    assert seen == [set(run.adapter.still()), set()]
    assert (technique == "gradnormlorp") == (not run.adapter.still())  # there B begins from W
    if "galore" in technique or "lorp" in technique:
        assert all(state["refreshed"] == (2 if rule.name_of(p) in seen[0] else 1) for p, state in rule.state.items()
                   if "refreshed" in state)  # fmt: skip


def test_mutation_vectors_that_are_not_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SST, "after_step", lambda self: None)
    with pytest.raises(EffectError, match="not of length 1"):
        first_step("sst")


def test_mutation_a_spectral_layer_that_keeps_its_weight() -> None:
    def keep(run: Run) -> None:
        module = run.adapter.module(next(iter(run.adapter.modules)))  # type: ignore[union-attr, attr-defined]
        module.register_parameter("weight", torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False))

    with pytest.raises(EffectError, match="still has its weight"):
        first_step("sst", disable=keep)


def test_mutation_a_sliced_layer_that_runs_plain() -> None:
    def plain(run: Run) -> None:
        assert run.adapter is not None
        del run.adapter.module(next(iter(run.adapter.table())).module).forward

    with pytest.raises(EffectError, match="no gradient reached them"):
        first_step("s2ft", disable=plain)


def test_mutation_a_sketched_layer_that_runs_plain() -> None:
    def plain(run: Run) -> None:
        assert run.adapter is not None
        del run.adapter.module(next(iter(run.adapter.table())).module).forward

    with pytest.raises(EffectError, match="no gradient reached them"):
        first_step("sketchtune", disable=plain)


def test_mutation_a_coded_layer_that_is_dense() -> None:
    def dense(run: Run) -> None:
        block = run.model.get_submodule(run.structure.blocks[1])
        layer = block.mlp.up_proj
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        plain.weight = torch.nn.Parameter(layer.weight.dense(), requires_grad=False)
        block.mlp.up_proj = plain

    with pytest.raises(EffectError, match=r"1 layers are dense, first model\.layers\.1\.mlp\.up_proj"):
        first_step("qlora-some", disable=dense)


@pytest.mark.skipif(not library.available(), reason="no native kernels")
def test_mutation_fused_layers_that_run_plain() -> None:
    def plain(run: Run) -> None:
        assert run.fused is not None
        run.fused.remove()

    with pytest.raises(EffectError, match="0 calls ran fused"):
        first_step(Technique(overrides=("exact.kernels=fused",)), disable=plain)


def test_mutation_states_that_are_wider_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def widen(run: Run) -> None:
        for state in run.optimizer.state.values():
            state["m"] = state["m"].float()

    run = make_run("8-bit", "llama")
    effect = Effect(run)
    run.step(batch_of("8-bit"))
    widen(run)
    with pytest.raises(EffectError, match="bytes of state"):
        effect.check(run, 1e-3)


def test_mutation_mixed_levels_that_are_one() -> None:
    def level(run: Any) -> None:
        run.recompute.keep = dict.fromkeys(run.recompute.keep, "nothing")

    with pytest.raises(EffectError, match="keep other results"):
        first_step("recompute-mixed", disable=level)


def test_mutation_offload_that_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saved, "pack", lambda self, tensor: tensor)
    with pytest.raises(EffectError, match="offload of 3 blocks to disk"):
        first_step("offload")


def test_mutation_kept_tensors_that_are_not_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coded, "_pack", lambda self, tensor: tensor)
    with pytest.raises(EffectError, match="kept tensors of 3 blocks in 8 bits"):
        first_step("coded")


def test_mutation_chunks_that_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        skimp.activations.chunked_mlp, "chunked", lambda part, x, *_: part(x.flatten(0, 1)).view(x.shape)
    )
    with pytest.raises(EffectError, match="MLPs of 3 blocks in chunks of 7 tokens"):
        first_step("mlp-chunk")


def test_mutation_offload_of_some_blocks_that_wraps_none() -> None:
    def unwrapped(run: Run) -> None:
        assert run.offload is not None
        run.offload.remove()
        run.offload = None

    with pytest.raises(EffectError, match="they are not wrapped"):
        first_step("offload-recompute", disable=unwrapped)


def test_mutation_states_on_disk_that_are_in_memory() -> None:
    with pytest.raises(EffectError, match="they are beside their parameters"):
        first_step("states-on-disk", disable=lambda run: run.optimizer.keep_states(None))


def test_mutation_states_on_disk_that_are_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Away, "holds", lambda self, name: False)
    with pytest.raises(EffectError, match="all of them are in memory"):
        first_step("states-on-disk")


def test_mutation_in_backward_that_holds_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was planned with each gradient freed at once, and gets a delivery that holds them."""

    def hold(run: Run) -> None:
        run.delivery.close()
        run.delivery = AfterBackward(run.delivery.parameters.items(), run.optimizer, None, run.delivery.sinks)
        run.stepper.delivery = run.delivery

    with pytest.raises(EffectError, match="gradients were held until it had ended"):
        first_step("in-backward-no-clip", disable=hold)


def test_mutation_gradients_kept_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("plain", "llama")
    effect = Effect(run)
    run.step(batch_of("plain"))
    name, parameter = next(iter(run.parameters()))
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(EffectError, match=name):
        effect.check(run, 1e-3)


@pytest.mark.parametrize("technique", ["grass-compact", "grass-compact-in-backward"])
def test_mutation_compact_layers_that_run_plain(technique: str) -> None:
    def plain(run: Run) -> None:
        assert run.compact is not None
        run.compact.remove()

    with pytest.raises(EffectError, match=r"21 of 21 came whole, first model\.layers\.0"):
        first_step(technique, disable=plain)


def test_mutation_layers_that_keep_their_whole_input() -> None:
    def plain(run: Run) -> None:
        assert run.pamm is not None
        run.pamm.remove()

    with pytest.raises(EffectError, match="they are not wrapped"):
        first_step("pamm", disable=plain)
    with pytest.raises(ConflictError, match=r"fused norm's output is made again[\s\S]*exact\.kernels=plain"):
        first_step(Technique(overrides=("activations.pamm=8",)))


def test_mutation_layers_that_keep_no_projection() -> None:
    def plain(run: Run) -> None:
        assert run.compact is not None
        run.compact.remove()

    with pytest.raises(EffectError, match=r"18 of 18 came whole, first model\.layers\.0\.mlp"):
        first_step("compact", disable=plain)


def test_mutation_accumulation_that_takes_all_rows_at_once() -> None:
    def whole(run: Run) -> None:
        run.step = lambda batch: run.stepper.step([batch])  # type: ignore[method-assign]

    with pytest.raises(EffectError, match="micro-batches of 1"):
        first_step("accumulation", disable=whole)


def test_mutation_clip_that_is_dropped_is_seen_by_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """No assertion stands for the clip: the factor is in every step's result and in the metrics."""
    run = make_run("plain", "llama")
    assert run.step(batch_of("plain")).clip_scale < 1.0
    monkeypatch.setattr(InBackward, "_factor", lambda self, norm: 1.0)
    run = make_run("in-backward", "llama")
    assert run.step(batch_of("in-backward")).clip_scale == 1.0


def test_rows_name_blocks_that_exist() -> None:
    assert all(max(line.exact.get("recompute", (0,))) < BLOCKS for line in TECHNIQUES.values())


def test_mutation_coded_derivatives_that_keep_everything() -> None:
    def plain(run: Run) -> None:
        assert run.derivatives is not None
        run.derivatives.remove()

    with pytest.raises(EffectError, match="coded derivatives in 3 modules"):
        first_step("derivative", disable=plain)


def test_mutation_a_side_network_whose_gate_stays_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    step = UpdateRule.step_parameter

    def all_but_the_gate(self: Any, p: Any, grad: Any = None) -> None:
        if not self.name_of(p).endswith(".gate"):
            step(self, p, grad)

    monkeypatch.setattr(UpdateRule, "step_parameter", all_but_the_gate)
    with pytest.raises(EffectError, match="its gate did not move"):
        first_step("qst")


def test_mutation_a_shifted_layer_that_runs_plain() -> None:
    def plain(run: Run) -> None:
        assert run.adapter is not None
        del run.adapter.module(run.adapter.linears[0]).forward  # type: ignore[attr-defined]

    with pytest.raises(EffectError, match="1 did not move"):
        first_step("s2a-bias", disable=plain)
