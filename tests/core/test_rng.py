"""All global generators go on bit-equal from a captured state, also twice and through JSON."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from skimp.core.errors import CheckpointError, SkimpError
from skimp.core.rng import capture, restore, seed_everything


def draw() -> tuple:
    """Odd counts, and normals: both Python and numpy keep one normal back."""
    return (
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.standard_normal(3).tobytes(),
        np.random.randint(0, 1000, 7).tobytes(),
        torch.randn(5).numpy().tobytes(),
        torch.randperm(9).numpy().tobytes(),
        torch.nn.functional.dropout(torch.ones(33)).numpy().tobytes(),
    )


@pytest.fixture(autouse=True)
def _leave_no_trace():
    state = capture()
    yield
    restore(state)


def test_the_stream_goes_on_twice() -> None:
    seed_everything(7)
    draw()
    state = json.dumps(capture())
    rest = [draw(), draw()]
    for _ in range(2):
        restore(json.loads(state))
        assert json.dumps(capture()) == state
        assert [draw(), draw()] == rest


def test_a_seed_fixes_every_generator() -> None:
    seed_everything(2**40 + 3)
    one = draw()
    seed_everything(2**40 + 3)
    assert draw() == one
    seed_everything(4)
    assert all(a != b for a, b in zip(draw(), one, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**63, True])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    with pytest.raises(SkimpError, match="a seed"):
        seed_everything(seed)


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    before = capture()
    for part, value in (
        ("python", {"version": 3, "words": [1], "gauss": None}),
        ("numpy", {**before["numpy"], "keys": "zz"}),
        ("numpy", {**before["numpy"], "keys": "00" * 8}),
        ("torch", "00"),
        ("torch", None),
        ("cuda", None),
    ):
        seed_everything(1)
        now = capture()
        with pytest.raises(CheckpointError, match="restoring the random state"):
            restore({**before, part: value})
        assert capture() == now
    with pytest.raises(CheckpointError, match="KeyError: 'torch'"):
        restore({key: value for key, value in before.items() if key != "torch"})


def test_more_cuda_devices_than_there_are_is_refused() -> None:
    state = capture()
    state["cuda"] = ["00" * 16] * (torch.cuda.device_count() + 1)
    with pytest.raises(CheckpointError, match="CUDA devices"):
        restore(state)
