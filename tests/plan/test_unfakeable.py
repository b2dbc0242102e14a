"""A model that reads values: named by module and operator, and planned from measured steps on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_extend import CONFIGS, recipe
from transformers.models.llama import modeling_llama

from skimp.core.exact import ExactChoices
from skimp.plan import unfakeable
from skimp.plan.make import make_plan
from skimp.plan.simulate import simulate

CONFIG = {**CONFIGS["llama"], "num_hidden_layers": 3}
EXACT = ExactChoices(2, (0,))


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Llama's feed-forward branches on its input; what the child would do is done here. Holds what was measured."""
    plain, taken = modeling_llama.LlamaMLP.forward, []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) if bool((x.detach() == x.detach()).all()) else x

    def here(words: str) -> str:
        taken.append(words)
        return unfakeable.take(words)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    monkeypatch.setattr(unfakeable, "_child", here)
    return taken


def test_the_error_names_module_and_operator_and_the_way_out(reading: list[str]) -> None:
    with pytest.raises(unfakeable.CannotSimulate) as caught:
        simulate(recipe("exact.kernels=plain"), EXACT, CONFIG, target="cuda")
    assert "model.layers.0.mlp (LlamaMLP)" in caught.value.found
    assert "_local_scalar_dense" in caught.value.found
    assert "device=cpu" in caught.value.instead[0]
    assert reading == []


def test_on_the_cpu_its_steps_are_measured(reading: list[str]) -> None:
    found = simulate(recipe("exact.kernels=plain"), EXACT, CONFIG, steps=1)
    assert len(reading) == 1
    assert "model.layers.0.mlp" in found.measured
    assert found.peak.total > sum(found.resting.values())


def test_measured_bytes_are_the_simulated_ones_where_both_can_be_had() -> None:
    described = recipe()
    real = simulate(described, EXACT, CONFIG, real=True)
    fake = simulate(described, EXACT, CONFIG)
    assert real.places == fake.places
    assert real.phases == fake.phases
    assert real.peak == fake.peak
    assert unfakeable.measured(described, EXACT, CONFIG, {"steps": 1, "blocks": 1}, "why").measured == "why"


def test_the_plan_says_so(reading: list[str]) -> None:
    plan = make_plan(recipe("exact.kernels=plain"), CONFIG, gpu="cpu", memory=4_000_000_000, offer=False)
    assert plan.fits
    assert any("measured on real tensors" in note and "model.layers.0.mlp" in note for note in plan.notes)
