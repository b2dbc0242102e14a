"""What `build` refuses before or right after the weights are there."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skimp.core import registry
from skimp.core.errors import ConflictError, ModelError
from skimp.core.exact import ExactChoices
from skimp.core.registry import Conflict
from skimp.kernels.native import library
from skimp.recipe import load_recipe
from skimp.run.build import build
from skimp.run.build_checks import check_path
from skimp.run.resting import resting_below
from skimp.run.techniques import techniques
from skimp.run.weights import init_scratch

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


def recipe(*overrides: str) -> Any:
    values = {"model": "x", "data": {"train": "pydoc", "seq_len": 16}, "output": "o", "train": {"batch_tokens": 32}}
    return load_recipe(values, overrides)


def make(kind: str, *overrides: str, exact: ExactChoices | None = None, **config: Any) -> Any:
    described = {"model_type": kind, **SIZES, **config}
    return build(recipe(*overrides), exact or ExactChoices(2), described, fill=lambda m: init_scratch(m, 0))


@pytest.mark.parametrize(
    ("kind", "extra"), [("olmo2", {}), ("granite", {"logits_scaling": 4.0}), ("cohere", {"logit_scale": 0.25})]
)
def test_an_untested_family_is_checked_on_real_tokens(kind: str, extra: dict[str, Any]) -> None:
    run = make(kind, **extra)
    run.close()


def test_a_family_with_something_between_is_refused() -> None:
    run = make("granite", logits_scaling=4.0)
    try:
        run.model.config.logits_scaling = 8.0
        run.model.logits_scaling = 8.0
        scaled = {name: value for name, value in vars(run.model).items() if name.startswith("logits")}
        assert scaled  # the model's own forward now divides by another number than the structure says
        with pytest.raises(ModelError, match=r"type 'granite'[\s\S]*differ[\s\S]*tested family"):
            check_path(run.model, run.structure)
    finally:
        run.close()


def test_a_pair_that_cannot_go_together_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = registry.facts("recompute")
    against = {"chunked-cross-entropy": Conflict("for this test", "leave one out")}
    monkeypatch.setitem(registry._methods, "recompute", replace(facts, conflicts=against))
    with pytest.raises(ConflictError, match=r"recompute[\s\S]*for this test[\s\S]*leave one out"):
        make("llama", exact=ExactChoices(2, (0,)))
    make("llama").close()


def test_every_technique_named_is_registered() -> None:
    exact = ExactChoices(2, (0,), None, True)
    assert set(techniques(recipe(), exact)) <= set(registry.methods())
    assert "adamw-bf16" in techniques(recipe("precision=bf16"), exact)


@pytest.mark.skipif(not library.available(), reason="native kernels")
def test_fused_layers_that_are_asked_for_and_not_there_are_refused() -> None:
    with pytest.raises(ConflictError, match=r"exact\.kernels=fused[\s\S]*olmo"):
        make("olmo", "exact.kernels=fused", hidden_act="relu")
    run = make("llama", "exact.kernels=fused")
    assert run.fused.norms == 5
    run.close()
    plain = make("llama", "exact.kernels=plain")
    assert plain.fused is None
    plain.close()


def test_show_to_counts_everything_that_rests() -> None:
    from skimp.core.memory.tracker import Tracker
    from skimp.data import synthetic_batch

    run, tracker = make("llama"), Tracker()
    batch = synthetic_batch(16, 2, 96)
    run.show_to(tracker, batch)
    weights = sum(p.nbytes for _, p in run.parameters())
    assert tracker.by_category["optimizer"] == 2 * weights
    assert tracker.by_category["batch"] == sum(t.nbytes for t in batch.tensors()) == 3 * 2 * 16 * 8 + 2 * 8
    assert tracker.by_category["weights"] == weights + sum(b.nbytes for b in run.model.buffers())
    assert isinstance(batch.source, torch.Tensor)
    run.close()


@pytest.mark.parametrize("adapter", [(), ("adapter={r: 2}",)])
def test_small_tensors_that_rest_are_counted_once_and_by_their_storage(adapter: tuple[str, ...]) -> None:
    """All of them by the tracker's own sum of what rests; at the embedding's size, all but the embedding's own."""
    from skimp.core.memory.tracker import Tracker
    from skimp.data import synthetic_batch

    run = make("llama", *adapter)
    tracker = Tracker()
    batch = synthetic_batch(16, 2, 96, (0, 16))
    run.show_to(tracker, batch)
    rest = tracker.live - tracker.by_category["batch"]
    assert resting_below(run, 1 << 40) == rest
    table = run.model.get_input_embeddings().weight.nbytes
    large = [n for _, n, category in tracker._known.values() if n >= table and category != "batch"]
    assert resting_below(run, table) == rest - sum(large)
    assert large
    assert resting_below(run, 0) == 0
    run.close()


def test_rules_that_add_up_take_micro_batches_in_backward_without_a_clip() -> None:
    """Between them: a rule that does not, a clip whose norm nobody knows, and one that works."""
    exact = ExactChoices(1, in_backward=True)
    with pytest.raises(ConflictError, match=r"exact\.in_backward=true[\s\S]*freed before the next"):
        make("llama", "train.clip=null", exact=exact)
    rule = "optimizer={name: galore, rank: 4}"
    with pytest.raises(
        ConflictError, match=r"train\.clip=1 with[\s\S]*whole gradients, which never exist[\s\S]*clip=null"
    ):
        make("llama", rule, exact=exact)
    run = make("llama", rule, "train.clip=null", exact=exact)
    run.delivery.begin(0, 2)
    assert run.delivery.micro_batches == 2
    with pytest.raises(ConflictError, match="freed before the next"):
        make("llama", "optimizer={name: fira, rank: 4}", "train.clip=null", exact=exact)


def test_a_rebuild_that_finds_no_place_leaves_a_run_that_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    exact = ExactChoices(2, recompute=(0,), offload=(0,))
    run = make("llama", f"exact.offload.folder={tmp_path}", exact=exact)
    monkeypatch.setattr("skimp.core.disk.open_unnamed", full)
    with pytest.raises(OSError, match="No space left"):
        run.rebuild(replace(exact, offload=(0, 1)))
    run.close()
    assert all("forward" not in vars(run.model.get_submodule(name)) for name in run.structure.blocks)


def test_compact_gradients_and_chunked_mlps_refuse_each_other() -> None:
    rule = ("optimizer={name: grass, rank: 4, compact: true}", "train.clip=null")
    with pytest.raises(ConflictError, match=r"exact\.mlp_chunk=4[\s\S]*first chunk[\s\S]*optimizer\.compact=false"):
        make("llama", *rule, exact=ExactChoices(2, mlp_chunk=4))
