"""Planes from three small simulations equal full simulations, to the byte, at depths they never saw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skimp.core.exact import ExactChoices
from skimp.plan.extend import Extension, Plane, extend
from skimp.plan.profile import MemoryProfile
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 301,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE, "num_hidden_layers": 12},
    "llama-tied": {"model_type": "llama", **SHAPE, "num_hidden_layers": 12, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 12,
        "n_head": 4,
        "n_positions": 512,
        "vocab_size": 301,
    },
}
ROWS, SEQ = 2, 40


def recipe(*overrides: str) -> Any:
    values = {
        "model": "tiny",
        "data": {"train": "pydoc", "seq_len": SEQ, "validation": None},
        "output": "runs/none",
        "train": {"steps": 2, "batch_tokens": ROWS * SEQ},
        "eval": None,
    }
    return load_recipe(values, overrides)


def extension(described: Any, row: ExactChoices, config: dict[str, Any]) -> Extension:
    def small(blocks: int, recomputed: int) -> MemoryProfile:
        exact = replace(row, recompute=tuple(range(recomputed)))
        return simulate(described, exact, config, steps=1, blocks=blocks)

    return extend(small)


def full(described: Any, row: ExactChoices, config: dict[str, Any], blocks: int, recomputed: int) -> MemoryProfile:
    exact = replace(row, recompute=tuple(range(recomputed)))
    return simulate(described, exact, config, steps=2, blocks=blocks)


ROW = ExactChoices(ROWS)
LATTICE = {
    "held": (ROW, ()),
    "micro-batches": (ExactChoices(1), ()),
    "in backward": (ExactChoices(ROWS, in_backward=True), ()),
    "in backward, no clip": (ExactChoices(ROWS, in_backward=True), ("train.clip=null",)),
    "8-bit, chunks of 16": (ExactChoices(ROWS, loss_chunk=16), ("optimizer=adamw8bit",)),
    "bf16": (ROW, ("precision=bf16",)),
}
#: (blocks, recomputed of them): none, one, some, all but one, all.
DEPTHS = [(12, 0), (12, 1), (12, 5), (12, 11), (12, 12)]


def check(style: str, row: ExactChoices, overrides: tuple[str, ...], depths: list[tuple[int, int]]) -> None:
    described = recipe(*overrides)
    planes = extension(described, row, CONFIGS[style])
    wrong = {}
    for blocks, recomputed in depths:
        profile = full(described, row, CONFIGS[style], blocks, recomputed)
        found = planes.peak(blocks - recomputed, recomputed)
        if found != profile.phases["train"]:
            wrong[blocks, recomputed] = (
                f"extended {found}, simulated {profile.phases['train']} in {profile.peak.where()}"
            )
        assert planes.seconds.at(blocks - recomputed, recomputed) == pytest.approx(profile.seconds, rel=1e-6)
    assert not wrong


@pytest.mark.parametrize(
    ("style", "name", "depths"),
    [
        ("llama-tied", "held", [(12, 0), (7, 7)]),
        ("gpt2", "held", [(12, 5)]),
        ("llama-tied", "in backward", [(12, 5)]),
        ("gpt2", "in backward, no clip", [(7, 3), (6, 6)]),
    ],
)
def test_planes_equal_full_simulations(style: str, name: str, depths: list[tuple[int, int]]) -> None:
    check(style, *LATTICE[name], depths)


@pytest.mark.slow
@pytest.mark.parametrize("style", CONFIGS)
@pytest.mark.parametrize("name", LATTICE)
def test_planes_equal_full_simulations_everywhere(style: str, name: str) -> None:
    check(style, *LATTICE[name], [*DEPTHS, (3, 1), (17, 6), (24, 24)])


def test_fewest_recomputed_is_the_smallest_number_that_fits() -> None:
    planes = extension(recipe(), ROW, CONFIGS["llama"])
    peaks = [planes.peak(12 - n, n) for n in range(13)]
    for budget in (peaks[0], peaks[0] - 1, peaks[6], peaks[12], peaks[12] - 1):
        fitting = [n for n in range(13) if peaks[n] <= budget]
        expected = fitting[0] if peaks[12] <= budget else None
        assert planes.fewest_recomputed(12, budget) == expected
    assert peaks[12] < peaks[0]


def test_moments_of_absent_blocks_do_not_count() -> None:
    moments = {
        ("backward", "kept last"): Plane(100.0, 1.0, 0.0),
        ("backward", "recomputed first"): Plane(500.0, 0.0, 1.0),
        ("forward", "loss head"): Plane(50.0, 0.0, 0.0),
    }
    planes = Extension(moments, Plane(0.0, 0.0, 0.0))
    assert planes.peak(3, 0) == 103
    assert planes.peak(0, 3) == 503
    assert Extension({("forward", "loss head"): Plane(50.0, 0.0, 0.0)}, Plane(0.0, 0.0, 0.0)).peak(3, 3) == 50
