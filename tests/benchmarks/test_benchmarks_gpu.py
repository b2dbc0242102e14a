"""The benchmark for cards: clean without one, and its rows build and step (on the CPU, for want of one)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card it measures, for minutes")
def test_without_a_card_nothing_is_measured_and_nothing_fails() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_truth.py")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no CUDA device here: nothing measured")


def test_every_row_is_a_recipe_and_exact_choices_that_go_together() -> None:
    import gpu_truth
    from skimp.core.memory.cuda_settings import read_settings
    from skimp.run.build import check_exact

    rows = gpu_truth.cases()
    assert len(rows) == 20
    for case in rows.values():
        recipe, config, exact = gpu_truth.described(case)
        check_exact(exact, recipe)
        assert len(exact.recompute) <= config["num_hidden_layers"]
        assert recipe.rows_per_step % exact.micro_rows == 0
        read_settings(case[3])


def test_a_row_steps_and_its_plan_has_all_that_the_table_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_truth
    from skimp.recipe import resolve_gpu

    found = gpu_truth.described(gpu_truth.cases()["fp32, step in backward"])
    config = found[1] | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    data = found[0].data.model_copy(update={"seq_len": 16})
    recipe = found[0].model_copy(update={"data": data, "train": found[0].train.model_copy(update={"batch_tokens": 32})})
    monkeypatch.setattr(gpu_truth, "described", lambda case: (recipe, config, found[2]))
    gpu_truth.run_on(gpu_truth.cases()["fp32, step in backward"], "cpu")
    plan = gpu_truth.planned(gpu_truth.cases()["fp32, expandable"], resolve_gpu("h100").card)
    assert 0 < plan["allocated_bytes"] <= plan["reserved_bytes"]
    assert plan["settings"] == "expandable_segments:True"
