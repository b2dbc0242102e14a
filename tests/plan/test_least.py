"""The smallest run is where the search ends: it fits its own bytes, and nothing fits a byte less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skimp.core.exact import ExactChoices
from skimp.core.memory.tracker import CATEGORIES
from skimp.plan.least import least
from skimp.plan.make import make_plan
from skimp.plan.places import Places
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": 301,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def recipe(tmp_path: Path, *overrides: str, seq: int = 1024) -> Any:
    values = {
        "model": "tiny", "output": str(tmp_path / "run"),
        "data": {"train": "pydoc", "seq_len": seq, "validation": None},
        "train": {"steps": 2, "batch_tokens": 6 * seq}, "eval": None, "checkpoint": {"at_end": False},
        "exact": {"micro_batch": 6, "malloc": "return"},
    }  # fmt: skip
    return load_recipe(values, overrides)


@pytest.mark.parametrize(
    "overrides",
    [("exact.offload.activations=none", "exact.offload.optimizer=none"), pytest.param((), marks=pytest.mark.slow)],
)
def test_the_least_is_where_the_search_ends(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    described, here = recipe(tmp_path, *overrides), Places("cpu", 1, 1, 10**12, 0, (), near=str(tmp_path))
    size, fits = least(described, CONFIG, here)
    assert not fits
    for more in (0, -1):
        where = replace(here, device_budget=size + more, host=size + more)
        assert make_plan(described, CONFIG, where=where, offer=False).fits is (more == 0)
    assert least(described, CONFIG, replace(here, device_budget=size, host=size))[1]


def test_rows_that_stand_for_all_change_neither_bytes_nor_seconds(tmp_path: Path) -> None:
    """Attention goes through documents row by row: a search lets three rows stand for all six."""
    described = recipe(tmp_path)
    every, some = (
        simulate(
            described, ExactChoices(6, (0,), loss_chunk=64), CONFIG, steps=1, short=short, documents=(0, 700, 1024)
        )
        for short in (False, True)
    )
    assert some.peak.total == every.peak.total
    assert dict(some.peak.by_category) == dict(every.peak.by_category)
    assert set(some.peak.by_category) == set(CATEGORIES)
    assert some.seconds == pytest.approx(every.seconds, rel=1e-9)


def test_what_blocks_may_wait_up_to_counts_no_phase_that_is_over(tmp_path: Path) -> None:
    """Loading may take more than a step of a short row; a run under way never comes back to it."""
    described = recipe(tmp_path, "exact.micro_batch=1", "optimizer=adamw", seq=8)
    profile = simulate(described, ExactChoices(1, (0, 1, 2)), CONFIG, steps=1)
    phases = {**profile.phases, "load": 2 * profile.peak_bytes}
    profile = replace(profile, phases=phases)
    assert profile.peak_bytes == phases["load"] > profile.working_bytes
    assert profile.working_bytes == max(phases["train"], phases["save"])
    heavier = replace(profile, phases={**phases, "train": 2 * phases["load"]})
    assert heavier.working_bytes == heavier.peak_bytes == heavier.phases["train"]
    read = replace(profile, phases={**phases, "resume": 2 * phases["load"]})
    assert read.working_bytes == profile.working_bytes < read.peak_bytes
