"""Plans of adapters: what small simulations stand for, what is offered, and what is refused before any search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skimp.adapters.lora import LoRA
from skimp.adapters.spec import Spec
from skimp.adapters.targets import TargetError
from skimp.core.codecs import NF4
from skimp.core.coded_model import linear_layers
from skimp.core.exact import ExactChoices
from skimp.core.structure import read_structure
from skimp.export.peft import write_peft
from skimp.plan.adapted import for_few_blocks
from skimp.plan.make import make_plan
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe
from skimp.run.skeleton import materialise, skeleton

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 256,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def recipe(*overrides: str) -> Any:
    values = {
        "model": "x", "data": {"train": "pydoc", "seq_len": 64}, "output": "o",
        "train": {"batch_tokens": 2 * 64}, "eval": None, "checkpoint": {"every": None, "at_end": True},
    }  # fmt: skip
    return load_recipe(values, overrides)


def test_every_block_of_a_small_model_gets_what_any_block_has() -> None:
    plain, every = recipe(), recipe("adapter=lora")
    assert for_few_blocks(plain, CONFIG) is plain
    assert for_few_blocks(every, CONFIG) is every
    some = recipe(r"adapter={r: 5, targets: 'model\.layers\.(1\.mlp\.up_proj|3\.self_attn\.[qk]_proj)'}")
    leaves = recipe("adapter={targets: [q_proj, up_proj]}")
    assert for_few_blocks(leaves, CONFIG) is leaves
    few = for_few_blocks(some, CONFIG).adapter
    assert set(few.targets) == {"mlp.up_proj", "self_attn.q_proj", "self_attn.k_proj"}
    assert (few.r, few.alpha, few.scale) == (5, 10.0, "standard")


@pytest.mark.parametrize("targets", [r"'model\.layers\.3\..*'", "[2.mlp.down_proj, q_proj]"])
def test_a_plan_of_chosen_layers_is_the_simulation_of_just_them(targets: str) -> None:
    asked = recipe(f"adapter={{targets: {targets}}}", "exact.in_backward=false")
    plan = make_plan(asked, CONFIG, memory=10**10)
    whole = simulate(asked, plan.exact, CONFIG)
    assert plan.profile.peak_bytes == whole.peak_bytes
    small = simulate(for_few_blocks(asked, CONFIG), plan.exact, CONFIG)
    assert small.peak_bytes > whole.peak_bytes
    assert plan.profile.trained == whole.trained < small.trained
    assert plan.disk_bytes == whole.kept_bytes == 12 * whole.trained


def test_a_target_that_matches_nothing_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skimp.plan.simulate.build", lambda *a, **k: pytest.fail("something was simulated"))
    with pytest.raises(TargetError, match="did you mean 'q_proj'"):
        make_plan(recipe("adapter={targets: [q_porj]}"), CONFIG, memory=10**10)


def test_trained_in_full_is_counted() -> None:
    exact = ExactChoices(2)
    bare, full = (simulate(recipe(f"adapter={{r: 2{more}}}"), exact, CONFIG) for more in ("", ", head: true"))
    assert full.trained - bare.trained == 256 * 64
    assert full.resting["adapters"] == bare.resting["adapters"] == 4 * bare.trained
    assert full.resting["optimizer"] - bare.resting["optimizer"] == 8 * 256 * 64


def test_lora_is_offered_when_nothing_exact_fits_and_reaches_what_it_says() -> None:
    # Wide enough that what LoRA saves is more than the 2 MiB in which a card's allocator counts.
    wide = CONFIG | {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 2048}
    plan = make_plan(recipe(), wide, gpu="24GB", memory=1_000_000)
    offer = next(a for a in plan.alternatives if a.overrides == ("adapter=lora",))
    assert not offer.exact
    assert offer.peak_bytes < plan.peak_bytes
    reached = make_plan(recipe("adapter=lora"), wide, gpu="24GB", memory=offer.peak_bytes)
    # A checkpoint's buffer of 4 MiB is more than all of so small a run.
    assert reached.profile.phases["train"] <= offer.peak_bytes


def test_an_adapter_or_a_model_from_scratch_is_offered_no_adapter() -> None:
    for more in ("adapter=lora", "model.init=scratch"):
        plan = make_plan(recipe(more), CONFIG, gpu="24GB", memory=100_000)
        assert plan.alternatives
        assert not any("adapter=lora" in a.overrides for a in plan.alternatives)


def test_an_nf4_base_is_offered_beside_an_adapter_and_reaches_what_it_says() -> None:
    wide = CONFIG | {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 2048}
    plan = make_plan(recipe("adapter=lora"), wide, gpu="24GB", memory=1_000_000)
    offer = next(a for a in plan.alternatives if a.overrides == ("model.weights=nf4",))
    assert not offer.exact
    assert offer.peak_bytes < plan.peak_bytes
    coded = recipe("adapter=lora", "model.weights=nf4")
    reached = make_plan(coded, wide, gpu="24GB", memory=offer.peak_bytes)
    assert reached.profile.phases["train"] <= offer.peak_bytes
    for more, offered in ((("adapter=lora", "model.weights=nf4"), 0), (("adapter={name: s2ft, o: 0.25, d: 0.1}",), 1)):
        found = make_plan(recipe(*more), wide, gpu="24GB", memory=1_000_000)
        assert sum("model.weights=nf4" in a.overrides for a in found.alternatives) == offered


def test_a_coded_base_counts_the_weights_it_stands_for_and_the_bytes_it_takes() -> None:
    exact = ExactChoices(2)
    plain, coded = (simulate(recipe("adapter=lora", *more), exact, CONFIG) for more in ((), ("model.weights=nf4",)))
    assert coded.parameters == plain.parameters
    assert coded.trained == plain.trained
    model = skeleton(CONFIG, torch.float32)
    layers = linear_layers(model, read_structure(model)).values()
    dense = sum(4 * layer.weight.numel() for layer in layers)
    packed = sum(NF4().nbytes(layer.weight.shape) for layer in layers)
    assert plain.resting["weights"] - coded.resting["weights"] == dense - packed


def test_a_continued_adapter_is_planned_as_the_same_one_begun(tmp_path: Path) -> None:
    model = skeleton(CONFIG, torch.float32)
    materialise(model, torch.float32, lambda shape, kind: torch.zeros(shape, dtype=kind))
    write_peft(tmp_path / "adapter", LoRA(model, Spec(r=5)), base_name="x")
    begun, continued = recipe("adapter={r: 5}"), recipe(f"adapter={{from: {tmp_path / 'adapter'}}}")
    few = for_few_blocks(continued, CONFIG).adapter
    assert (few.source, few.r, few.alpha) == (None, 5, 32.0)
    plans = [make_plan(asked, CONFIG, memory=10**10) for asked in (begun, continued)]
    assert plans[0].profile.peak_bytes == plans[1].profile.peak_bytes
