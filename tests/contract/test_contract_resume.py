"""Save, a new run, load, go on; twice: losses, weights and every state bit-equal to a run that was never
broken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract_rows import CELLS, TECHNIQUES, batch_of, make_run, recipe_of, weights
from torch import Tensor

from skimp.core.batch import Batch
from skimp.run.build import Run
from skimp.run.loop import State
from skimp.run.saving import Saver, open_newest, restore_adapter, restore_optimizer, restore_place, weights_from

FAST = [
    ("8-bit", "gpt2"),
    ("bf16", "llama-tied"),
    ("packing-accumulation", "qwen2"),
    ("in-backward-recompute", "llama"),
    ("bf16-8-bit", "llama-tied"),
    ("s2-recompute", "llama-tied"),
    ("plain", "gemma2"),
    ("lora-dropout-recompute", "llama-tied"),
    ("lora-bf16", "gpt2"),
    ("lora-full", "llama-tied"),
    ("olora", "llama-tied"),
    ("loftq", "gpt2"),
    ("relora", "llama-tied"),
    ("gradnormlorp", "gpt2"),
    ("s2ft-permuted", "llama-tied"),
    ("derivative-stochastic", "llama-tied"),
    ("sst", "gpt2"),
    ("sketchtune", "gpt2"),
    ("sketchtune-2-bit", "llama-tied"),
    ("sst-bf16-mixed", "llama-tied"),
    ("qst", "llama-tied"),
    ("s2a-derivative", "gpt2"),
    ("galore8bit-compact-adds-up", "llama-tied"),
    ("int8-q-galore-compact-adds-up", "llama-tied"),
    ("int8-q-galore-in-backward", "gpt2"),
    ("bf16-int8-q-galore", "llama-tied"),
    ("momentum-reset", "llama-tied"),
    ("compact-adds-up", "gpt2"),
    ("pamm-accumulation", "llama-tied"),
    ("refactor", "llama-tied"),
]
BASE = "the base of these tests"
SLOW = [cell for cell in CELLS if cell not in FAST]


class Stream:
    """A stream of seeded batches whose position is its whole state."""

    def __init__(self, technique: str) -> None:
        self.technique, self.position = technique, 0

    def next_step(self) -> Batch:
        self.position += 1
        return batch_of(self.technique, seed=self.position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def disturb(run: Run) -> None:
    """Other numbers in everything an adapter trains, so that what comes after was read."""
    assert run.adapter is not None
    with torch.no_grad():
        for parameter in run.adapter.parameters():
            parameter.fill_(0.5)


def go_on(run: Run, stream: Stream, state: State, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        run.set_lr(1e-3 / (1 + state.step))
        losses.append(run.step(stream.next_step()).loss)
        state.step += 1
    return losses


def save(root: Path, run: Run, stream: Stream, state: State) -> None:
    Saver(root, keep=2, facts={"base": BASE}).save(SimpleNamespace(run=run, stream=stream, state=state))


def resumed(root: Path, technique: str, style: str) -> tuple[Run, Stream, State]:
    """A run with other weights and a stream at its start, brought to what was saved. An adapter's base is
    loaded anew."""
    adapter = recipe_of(TECHNIQUES[technique]).adapter is not None
    run, stream, state = make_run(technique, style, seed=0 if adapter else 99), Stream(technique), State()
    with open_newest(root) as saved:
        restore_place(saved, run.recipe, stream, state)
        if adapter:
            assert saved.names("adapter")
            assert "model" not in saved.groups
            disturb(run)
            restore_adapter(saved, run, BASE)
        else:
            weights_from(saved)(run.model)
        restore_optimizer(saved, run)
    return run, stream, state


def all_state(run: Run) -> dict[str, Any]:
    return weights(run) | {f"{n}.{k}": v for n, k, v in run.optimizer.named_state()}


def check(root: Path, technique: str, style: str) -> None:
    run, stream, state = make_run(technique, style), Stream(technique), State()
    whole = go_on(run, stream, state, 6)
    expected = all_state(run)

    run, stream, state = make_run(technique, style), Stream(technique), State()
    losses = go_on(run, stream, state, 2)
    for _ in range(2):
        save(root, run, stream, state)
        run.close()
        run, stream, state = resumed(root, technique, style)
        losses += go_on(run, stream, state, 2)
    assert losses == whole
    assert len(set(losses)) > 2  # other batches; two of six may meet in float32
    found = all_state(run)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype
        else:
            assert found[name] == value, name
    assert run.delivery.step_index == 6


@pytest.mark.parametrize(("technique", "style"), FAST)
def test_resumed_twice_is_bit_equal(tmp_path: Path, technique: str, style: str) -> None:
    check(tmp_path / "run" / "checkpoints", technique, style)


@pytest.mark.slow
@pytest.mark.parametrize(("technique", "style"), SLOW)
def test_resumed_twice_is_bit_equal_in_the_whole_table(tmp_path: Path, technique: str, style: str) -> None:
    check(tmp_path / "run" / "checkpoints", technique, style)
