"""Whole sessions of adapters with modules of their own: saved, resumed to the bit, used attached, never merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import Heard, lines, merged

import skimp
from skimp.core.errors import ConflictError, RecipeError
from skimp.export.adapter import export_adapter
from skimp.export.merged import export_merged
from skimp.run.checkpoint_folder import latest
from skimp.run.checkpoint_read import load
from skimp.run.found import find
from skimp.run.generate import Decoder
from skimp.run.opened import open_model

pytestmark = pytest.mark.usefixtures("plan_once")

CASES = {
    "qst": ({"name": "qst", "reduce": 4}, {}),
    "qst on 4 bits": ({"name": "qst", "reduce": 4, "down": "avgpool", "gate": "sigmoid"}, {"weights": "nf4"}),
    "s2a": ({"name": "s2a", "prompt": 3, "rank": 2}, {}),
}


def start(recipe: dict[str, Any], case: str, voice: Any = None, resume: bool = False, **changes: Any) -> Any:
    adapter, model = CASES[case]
    changed = {**recipe, "adapter": adapter, "model": {"name": recipe["model"], **model}}
    return skimp.train(merged(changed, changes), resume=resume, voice=voice)


@pytest.mark.parametrize("case", CASES)
def test_saved_resumed_and_used_attached(recipe: dict[str, Any], tmp_path: Path, case: str) -> None:
    whole = start(recipe, case, output=str(tmp_path / "whole"))
    start(recipe, case, Heard(stop_at=3))
    outcome = start(recipe, case, resume=True)
    losses = [step["loss"] for step in lines(outcome.folder / "metrics.jsonl")]
    assert losses == [step["loss"] for step in lines(whole.folder / "metrics.jsonl")]
    assert len(losses) == 6
    with load(latest(outcome.folder / "checkpoints")) as found, load(latest(whole.folder / "checkpoints")) as expected:
        assert found.groups == ["adapter", "optimizer"]
        for name in expected.names("adapter"):
            assert torch.equal(found.read("adapter", name), expected.read("adapter", name))

    opened = open_model(find(str(outcome.folder)))
    ids = list(range(1, 10))
    positions = torch.arange(9).unsqueeze(0)
    together = opened.head.logits_of(torch.tensor([ids]), positions)[0, -1]
    decoder = Decoder(opened)
    decoder.feed(ids[:4])
    one_by_one = [decoder.feed([i]) for i in ids[4:]][-1]
    torch.testing.assert_close(one_by_one, together, rtol=1e-4, atol=1e-4)

    for export in (export_merged, export_adapter):
        with pytest.raises(ConflictError, match=r"(modules of its own|PEFT|no weight)[\s\S]*--to adapter"):
            export(find(str(outcome.folder)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("adapter", "error", "said"),
    [
        ({"name": "qst", "reduce": 5}, ConflictError, r"adapter\.reduce=5[\s\S]*4 heads of 16[\s\S]*reduce=4"),
        ({"name": "qst", "reduce": 16}, ConflictError, r"adapter\.reduce=16[\s\S]*whole even number"),
        ({"name": "qst", "gate": "sigmod"}, RecipeError, r"adapter\.gate[\s\S]*one of paper, sigmoid"),
        ({"name": "qst", "down": "adapter"}, Exception, r"adapter\.down: 'adapter'[\s\S]*adapter:16"),
        ({"name": "qst", "r": 16}, RecipeError, r"adapter\.r[\s\S]*qst takes"),
        ({"name": "s2a", "bias": False, "prompt": 0}, ConflictError, "nothing that trains"),
        ({"name": "s2a", "prompt": -1}, RecipeError, r"adapter\.prompt"),
        ({"name": "s2a", "modules": ["bias"]}, RecipeError, r"adapter\.modules[\s\S]*bias, prompt, rank"),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_loaded(
    recipe: dict[str, Any], adapter: dict[str, Any], error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("skimp.run.session.load_weights", never)
    with pytest.raises(error, match=said):
        skimp.train({**recipe, "adapter": adapter})
    assert not Path(recipe["output"]).exists()


def test_coded_derivatives_take_4_bits_only(recipe: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"activations\.derivative[\s\S]*derivative: 4"):
        skimp.train({**recipe, "activations": {"derivative": 3}})
