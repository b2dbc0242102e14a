"""Every offer is what it says: typed into the recipe it fits the bytes it names, and takes a real step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skimp.api
from skimp.core.exact import ExactChoices
from skimp.data.synthetic import synthetic_batch
from skimp.plan.cost import Rates
from skimp.plan.offers import offers
from skimp.plan.places import Places, budgets
from skimp.plan.plan import Alternative
from skimp.plan.search import Search
from skimp.recipe import load_recipe
from skimp.run.build import build
from skimp.run.weights import init_scratch

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 320,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "vocab_size": 301, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RATES = Rates(1e11, 2e10, "a test's")


@pytest.fixture
def described(tmp_path: Path) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def make(*overrides: str) -> Any:
        values = {
            "model": str(tmp_path), "data": {"train": "pydoc", "seq_len": 256, "validation": None},
            "output": str(tmp_path / "run"), "train": {"steps": 2, "batch_tokens": 256}, "eval": None,
        }  # fmt: skip
        return load_recipe(values, overrides)

    return make


WANTED = {
    (): {"optimizer=adamw8bit", "adapter=lora", "model.weights=nf4", "precision=bf16", "data.seq_len=128"},
    ("adapter={name: lora, r: 4}",): {"model.weights=nf4", "model.weights=int8", "precision=bf16"},
    ("data.seq_len=1024", "train.batch_tokens=1024"): {
        "activations.kept_bits=8",
        "activations.derivative=4",
        "attention={name: s2-attention, local: 8, stride: 2}",
    },
    ("precision=bf16-mixed", "adapter={name: lora, embeddings: true}"): {"optimizer=adamw8bit", "model.weights=nf4"},
}
CASES = [pytest.param(case, marks=[pytest.mark.slow] if n != 1 else []) for n, case in enumerate(WANTED)]


@pytest.mark.parametrize("overrides", CASES)
def test_every_offer_is_simulated_ranked_and_runs(described: Any, overrides: tuple[str, ...]) -> None:
    recipe = described(*overrides)
    where = Places("cpu", 2_000_000, 2_000_000, 10**12, 0, ())
    found = offers(recipe, CONFIG, 2, where, RATES, "cpu", 10**12, -(10**12))
    assert {word for offer in found for word in offer.overrides} >= WANTED[overrides]
    assert [a.peak_bytes for a in found if not a.fits] == sorted(a.peak_bytes for a in found if not a.fits)
    assert not any("adapter" in word for a in found for word in a.overrides) or recipe.adapter is None
    for offer in found:
        changed = load_recipe(recipe.as_dict(), offer.overrides)
        assert changed != recipe
        allowed = budgets(where, changed)
        # The very run it speaks of: its bytes are simulated anew, and it takes a real step.
        search = Search(changed, CONFIG, 2, allowed, RATES, "cpu")
        row, again = search.lattice.least(next(iter(search.lattice.roots(in_backward=True)))), 2
        exact = search.exact(row, again)
        tracked = search.full(exact, short=True).phases["train"]
        simulated = min(where.resident_peak(tracked, policy) for policy in allowed)
        if recipe.adapter is None:
            assert simulated == offer.peak_bytes, offer
        else:  # few blocks stand for all, so the first one's input has a gradient that a frozen embedding spares it
            spared = 4 * recipe.train.batch_tokens * CONFIG["hidden_size"]
            assert simulated <= offer.peak_bytes <= simulated + 1.1 * spared, offer
        took_a_step(changed, exact)


def took_a_step(recipe: Any, exact: ExactChoices) -> None:
    run = build(recipe, exact, CONFIG, fill=lambda model: init_scratch(model, 0))
    before = {name: p.detach().clone() for name, p in run.delivery.parameters.items()}
    result = run.step(synthetic_batch(recipe.data.seq_len, recipe.rows_per_step, 301, "whole"))
    assert result.loss == result.loss
    assert any(not before[name].equal(p.detach()) for name, p in run.delivery.parameters.items())
    run.close()


def test_auto_takes_what_leaves_the_text_and_the_kind_of_training_alone(
    described: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter in the recipe a coarser base may be taken; a shorter sequence, an adapter or another attention
    never is."""
    said: list[str] = []
    voice: Any = SimpleNamespace(say=said.append, planned=lambda _: None)

    def planned(recipe: Any, source: Any, text_bytes: int = 0) -> Any:
        ways = [
            ("data.seq_len=128",),
            ("adapter=lora", "model.weights=nf4"),
            ("attention={name: s2-attention, local: 8, stride: 2}",),
            ("model.weights=nf4",),
            ("optimizer=lion",),
        ]
        offered = [Alternative("an offer", 1, 1.0, True, False, way) for way in ways]
        fits = recipe.model.weights is not None
        return SimpleNamespace(fits=fits, alternatives=offered, places=SimpleNamespace(available=None), peak_bytes=1)

    monkeypatch.setattr(skimp.api, "plan_recipe", planned)
    monkeypatch.setattr(skimp.api, "refuse_unless_fits", lambda plan: None)
    taken, plan = skimp.api.settle(described("adapter=lora", "auto=approximate"), None, voice)
    assert plan.fits
    assert taken.model.weights.name == "nf4"
    assert taken.adapter.name == "lora"
    assert taken.data.seq_len == 256
    assert taken.attention is None
    assert "model.weights=nf4" in said[0]
    # Without the word nothing is taken.
    kept, plan = skimp.api.settle(described("adapter=lora"), None, voice)
    assert not plan.fits
    assert kept.model.weights is None
