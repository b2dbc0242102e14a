"""Whatever a person names is opened: a run, a checkpoint, a folder, with an adapter merged; and what is not is told."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import merged

import skimp.api
from skimp.core.errors import CheckpointError, DataError, DoesNotFit, ModelError
from skimp.data.synthetic import synthetic_batch
from skimp.run.evaluation import choose_way, score
from skimp.run.found import find
from skimp.run.held_out import held_out
from skimp.run.opened import open_model

IDS = torch.arange(3, 20).unsqueeze(0)


@pytest.fixture
def run(recipe: dict[str, Any], plan_once: None) -> Path:
    """A finished run with checkpoints of steps 2, 4 and 6."""
    skimp.api.train(merged(recipe, {"checkpoint": {"every": 2, "keep": 3}, "eval.tokens": 100_000}))
    return Path(recipe["output"])


def logits(asked: str, checkpoint: str | None = None) -> torch.Tensor:
    with find(asked, checkpoint) as found:
        opened = open_model(found)
    return opened.head.logits_of(IDS, torch.arange(IDS.shape[1]).unsqueeze(0))


def test_a_run_is_its_newest_checkpoint_or_the_one_that_is_named(run: Path) -> None:
    newest = logits(str(run))
    assert torch.equal(newest, logits(str(run / "checkpoints" / "step-00000006")))
    earlier = logits(str(run), "4")
    assert torch.equal(earlier, logits(str(run), "step-00000004"))
    assert not torch.equal(earlier, newest)
    with pytest.raises(CheckpointError, match=r"step-00000002, step-00000004, step-00000006"):
        find(str(run), "5")
    with pytest.raises(CheckpointError, match="only a run has checkpoints"):
        find(json.loads((run / "recipe.json").read_text())["model"]["name"], "4")


def test_a_run_without_a_complete_checkpoint_says_so(run: Path) -> None:
    for folder in (run / "checkpoints").iterdir():
        (folder / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint[\s\S]*did not finish"):
        find(str(run))


def test_evaluation_is_the_sessions_own(run: Path, recipe: dict[str, Any]) -> None:
    """The same rows, the same head: the loss of summary.json, to the last bit but the order of a float sum."""
    with find(str(run)) as found:
        text = held_out(found, [])
        way = choose_way(found, torch.float32, text.seq_len, None)
        opened = open_model(found)
    (name, rows), *rest = text.sets.items()
    seen = []
    result = score(opened, rows, name, way, show=seen.append)
    summary = json.loads((run / "summary.json").read_text())
    assert rest == []
    assert result.loss == pytest.approx(summary["eval_loss_after"], rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert (seen[-1].rows, seen[-1].total, result.rows) == (len(rows),) * 3
    one = score(opened, rows, name, way, limit=1)
    assert one.tokens < result.tokens
    assert one.rows == 1


def test_other_text_is_scored_whole_by_the_rules_of_the_run(run: Path, text_file: Path) -> None:
    with find(str(run)) as found:
        text = held_out(found, [str(text_file)])
        with pytest.raises(DataError, match=r"no such file"):
            held_out(found, ["nowhere.jsonl"])
    [(name, rows)] = text.sets.items()
    assert name == str(text_file)
    assert rows.table.lengths.sum() > 0
    assert text.seq_len == 32


def test_a_model_that_is_no_run_needs_text(tiny_folder: Path) -> None:
    with find(str(tiny_folder)) as found, pytest.raises(DataError, match=r"--data FILE"):
        held_out(found, [])


def test_a_budget_chooses_the_rows_and_refuses_what_cannot_fit(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skimp.run.evaluation.warm_baseline", lambda: 400_000_000)
    with find(str(tiny_folder)) as found:
        wide = choose_way(found, torch.float32, 32, None)
        assert wide.rows == 64
        narrow = choose_way(found, torch.float32, 32, wide.resident - 1)
        assert narrow.rows < wide.rows
        assert narrow.tracked < wide.tracked
        with pytest.raises(DoesNotFit, match=r"within 1\.00 MB[\s\S]*--budget \d+MB[\s\S]*bf16"):
            choose_way(found, torch.float32, 32, 10**6)


class EndlessRows:
    """Rows made when they are read: what is measured is not the data's own memory."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def in_order(self, rows: int, limit: int | None) -> Any:
        for start in range(0, self.number, rows):
            yield synthetic_batch(32, min(rows, self.number - start), 320, seed=start)


def test_memory_is_flat_over_ten_thousand_rows(tiny_folder: Path) -> None:
    """Resident bytes after 1,000 rows and after 10,000; and the tensors of one batch as of three, by the tracker."""
    from skimp.core.memory.tracker import Tracker

    with find(str(tiny_folder)) as found:
        way = choose_way(found, torch.float32, 32, None)
        opened = open_model(found)
    seen = []
    score(opened, EndlessRows(10_000), "endless", way, show=seen.append)
    after = [r.memory for r in seen if r.rows >= 1000]
    # Kept hidden states of 9,000 rows would be 74 MB, kept logits 369 MB; glibc's own rules sway by a few.
    assert max(after) - after[0] < 12_000_000
    peaks = []
    for count in (1, 3):
        tracker = Tracker()
        tracker.hold(opened.model.parameters(), "weights")
        with tracker:
            score(opened, EndlessRows(count * way.rows), "endless", way)
        peaks.append(tracker.peak.total)
    # The last batch while the next one is made: three tensors of rows x 32 int64, and the rows' sources.
    assert peaks[1] - peaks[0] <= 3 * way.rows * 32 * 8 + way.rows * 8
    assert peaks[0] <= way.tracked


@pytest.mark.parametrize(
    "changes", [{}, {"adapter.embeddings": True}, {"adapter.scale": "rslora", "precision": "bf16"}]
)
def test_an_adapter_is_merged_tensor_by_tensor(
    recipe: dict[str, Any], plan_once: None, tmp_path: Path, changes: dict[str, Any]
) -> None:
    base = {"adapter": {"name": "lora", "r": 4}, "eval.tokens": 100_000, "train.lr": 3e-2}
    skimp.api.train(merged(merged(recipe, base), changes))
    summary = json.loads((Path(recipe["output"]) / "summary.json").read_text())
    with find(recipe["output"]) as found:
        text = held_out(found, [])
        opened = open_model(found)
    way = choose_way(found, torch.float32, 32, None)
    [(name, rows)] = text.sets.items()
    result = score(opened, rows, name, way)
    tolerance = 2e-2 if "precision" in changes else 1e-5
    assert result.loss == pytest.approx(summary["eval_loss_after"], abs=tolerance)
    assert abs(summary["eval_loss_after"] - summary["eval_loss_before"]) > 0.1


def test_an_adapter_on_changed_weights_is_refused(
    recipe: dict[str, Any], plan_once: None, tiny_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    own = shutil.copytree(tiny_folder, tmp_path / "base")
    skimp.api.train(merged(recipe, {"model": str(own), "adapter": "lora"}))
    tensors = load_file(own / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    with find(recipe["output"]) as found, pytest.raises(CheckpointError, match=r"fingerprint[\s\S]*another model"):
        open_model(found)


def test_a_quantised_folder_and_a_misspelt_precision_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with find(str(tiny_folder)) as found, pytest.raises(ModelError, match="did you mean 'bf16'"):
        open_model(found, "bf61")
    folder = shutil.copytree(tiny_folder, tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"quantised with gptq"):
        find(str(folder))
