"""Whole sessions that train parts of the weights themselves: said, saved, resumed, evaluated and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import Heard, lines, merged
from transformers import AutoModelForCausalLM

import skimp
from skimp.adapters.handle import Row
from skimp.adapters.sst import SST as SpectralHandle
from skimp.core.errors import SkimpError
from skimp.core.structure import read_structure
from skimp.export.adapter import export_adapter
from skimp.export.merged import export_merged
from skimp.run.adapt import table_lines
from skimp.run.checkpoint_folder import latest
from skimp.run.checkpoint_read import load
from skimp.run.found import find

pytestmark = pytest.mark.usefixtures("plan_once")
S2FT = {"name": "s2ft", "v": 0.5, "o": 0.25, "u": 0.05, "d": 0.1}
IDS = torch.arange(1, 20).unsqueeze(0)


def start(recipe: dict[str, Any], adapter: dict[str, Any], voice: Any = None, resume: bool = False, **more: Any) -> Any:
    return skimp.train(merged({**recipe, "adapter": adapter}, more), resume=resume, voice=voice)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("permuted", [False, True])
def test_s2ft_is_resumed_to_the_bit_with_its_selection(recipe: dict[str, Any], tmp_path: Path, permuted: bool) -> None:
    adapter, voice = {**S2FT, "permute": permuted}, Heard()
    whole = start(recipe, adapter, voice, output=str(tmp_path / "whole"))
    assert any("trained numbers" in line for line in voice.said)
    start(recipe, adapter, Heard(stop_at=3))
    outcome = start(recipe, adapter, resume=True)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    with load(latest(outcome.folder / "checkpoints")) as found, load(latest(whole.folder / "checkpoints")) as expected:
        assert found.meta["adapter"] == expected.meta["adapter"]
        assert found.meta["adapter"]["slices"]
        for name in expected.names("adapter"):
            assert torch.equal(found.read("adapter", name), expected.read("adapter", name))
    assert outcome.summary["loss_last"] < outcome.summary["loss_first"]


@pytest.mark.parametrize("select", ["activation", "gradient"])
def test_what_text_chose_is_planned_said_resumed_and_does_not_depend_on_the_micro_batch(
    recipe: dict[str, Any], tmp_path: Path, select: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, voice = {"name": "s2ft", "o": 0.5, "d": 0.1, "select": select, "batches": 2}, Heard()
    whole = start(recipe, adapter, voice, output=str(tmp_path / "whole"))
    assert any(f"chosen by {select}" in line for line in voice.said)
    assert whole.summary["plan"]["phases"]["choose"] > 0
    one = start(recipe, adapter, output=str(tmp_path / "one"), **{"exact.micro_batch": 1})
    start(recipe, adapter, Heard(stop_at=3))
    # A resume reads the choice: it looks at no text.
    monkeypatch.setattr("skimp.run.session.choose_on_text", lambda *a: pytest.fail("chosen anew"))
    outcome = start(recipe, adapter, resume=True)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    metas = []
    for run in (whole, one, outcome):
        with load(latest(run.folder / "checkpoints")) as saved:
            metas.append(saved.meta["adapter"])
    assert metas[0] == metas[1] == metas[2]
    assert whole.summary["loss_last"] < whole.summary["loss_first"]


def test_text_is_not_asked_of_a_coded_base_for_gradients(recipe: dict[str, Any], tiny_folder: Path) -> None:
    adapter = {"name": "s2ft", "o": 0.5, "d": 0.1, "select": "gradient"}
    with pytest.raises(SkimpError, match=r"codes have no gradient[\s\S]*select=activation"):
        start({**recipe, "model": {"name": str(tiny_folder), "weights": "nf4"}}, adapter)
    assert not Path(recipe["output"]).exists()


def test_s2ft_is_exported_merged_and_for_peft(recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    outcome = start(recipe, {**S2FT, "permute": True})
    for export, name in ((export_merged, "merged"), (export_adapter, "peft")):
        found = find(str(outcome.folder))
        export(found, tmp_path / name)
        found.close()
    merged_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    plain = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    torch.testing.assert_close(logits(adapted), logits(merged_model), rtol=0, atol=1e-5)
    assert float((logits(adapted) - plain).abs().max()) > 0.01


SST = {"name": "sst", "r": 8, "every": 2, "warmup": 1, "draws": 2}


@pytest.mark.parametrize("scratch", [False, True])
def test_sst_is_resumed_to_the_bit_and_exported(
    recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path, scratch: bool
) -> None:
    """A draw at steps 2 and 4, the end of a round at 4: stopped before, at and between them."""
    if scratch:
        recipe = {**recipe, "model": {"name": str(tiny_folder), "init": "scratch"}}
    whole = start(recipe, SST, output=str(tmp_path / "whole"))
    start(recipe, SST, Heard(stop_at=3))
    start(recipe, SST, Heard(stop_at=4), resume=True)
    outcome = start(recipe, SST, resume=True)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    with load(latest(outcome.folder / "checkpoints")) as found, load(latest(whole.folder / "checkpoints")) as expected:
        for name in expected.names("adapter"):
            assert torch.equal(found.read("adapter", name), expected.read("adapter", name)), name
        spectral = AutoModelForCausalLM.from_pretrained(tiny_folder)
        again = SpectralHandle.rebuild(spectral, read_structure(spectral), found.meta["adapter"])
        again.load(lambda name: found.read("adapter", name))
    assert outcome.summary["loss_last"] < outcome.summary["loss_first"]
    stored = find(str(outcome.folder))
    export_merged(stored, tmp_path / "merged")
    stored.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_folder).parameters()
    )
    torch.testing.assert_close(logits(model), logits(spectral), rtol=0, atol=1e-5)
    with pytest.raises(SkimpError, match="PEFT"):
        export_adapter(find(str(outcome.folder)), tmp_path / "peft")


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ({"name": "s2ft", "o": 0.01, "d": 0}, r"adapter\.o=0\.01[\s\S]*0 of 8 query heads[\s\S]*o=0\.125"),
        ({"name": "s2ft", "o": 0, "d": 0}, r"all are 0"),
        ({"name": "sst", "r": 500}, r"adapter\.r=500[\s\S]*64 singular vectors"),
        ({"name": "sst", "r": 8, "targets": ["q_porj"]}, r"did you mean 'q_proj'"),
        ({"name": "s2ft", "r": 4}, r"adapter\.r[\s\S]*s2ft takes v, o, u, d"),
        ({"name": "s2ft", "select": "size"}, r"adapter\.select[\s\S]*random, weight, activation, product, gradient"),
        ({"name": "s2ft", "select": "activation", "batches": 0}, r"adapter\.batches"),
        ({"name": "s2ft", "select": "activation", "o": 0.01, "d": 0}, r"adapter\.o=0\.01[\s\S]*0 of 4 query heads"),
    ],
)
def test_bad_slices_are_refused_before_a_weight_is_loaded(
    recipe: dict[str, Any], adapter: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("skimp.run.session.load_weights", never)
    with pytest.raises(SkimpError, match=said):
        start(recipe, adapter)
    assert not Path(recipe["output"]).exists()


def test_a_table_of_many_widths_has_one_line_a_kind_of_layer() -> None:
    rows = [Row(f"model.layers.{i}.mlp.down_proj", "columns", (64, 160), 3 + i, 64 * (3 + i), 256) for i in range(6)]
    blocks = tuple(f"model.layers.{i}" for i in range(6))
    assert table_lines(rows, blocks)[1:] == [
        "  down_proj (columns): 6 of 64 x 160, r 3 to 8, all blocks, 2,112 numbers, 1.54 kB"
    ]
    assert len(table_lines(rows[:2], blocks)) == 3
