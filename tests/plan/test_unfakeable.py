"""A model that reads values: named by module and operator, and planned from measured steps on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_extend import CONFIGS, recipe
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama import modeling_llama

from skimp.core.child import last_words
from skimp.core.exact import ExactChoices
from skimp.core.memory.tracker import Tracker
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


class Experts(torch.nn.Module):
    """Two of them, one product; in float32 it has a real form and no simulated one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 16, 16))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight, offs=ends)


def test_an_operator_without_a_simulated_form_is_named_quietly(caplog: pytest.LogCaptureFixture) -> None:
    mode = FakeTensorMode()
    with mode:
        model = torch.nn.ModuleDict({"experts": Experts()})
        x, ends = torch.zeros(8, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(unfakeable.CannotSimulate) as caught, unfakeable.told(model, Tracker()), mode:
        model["experts"](x, ends)
    assert "_grouped_mm" in caught.value.found
    assert "experts (Experts)" in caught.value.found
    assert "refuses what it is given" in caught.value.why
    assert not caplog.records


def test_what_has_nothing_to_do_with_simulating_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="another"), unfakeable.told(torch.nn.Linear(1, 1), Tracker()):
        raise RuntimeError("another")


def test_the_whole_of_what_a_child_ended_with_is_told() -> None:
    said = "Traceback (most recent call last):\n  File x\nskimp.Error: a step\n  found:   NaN\n  instead: less\n"
    assert last_words(said) == "skimp.Error: a step; found:   NaN; instead: less"
    assert last_words("") == "it said nothing"
    assert last_words("  File x") == "File x"
