"""Layers that keep less of their input still learn: a tiny model on real text, bytes of Python's own help."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from skimp.core.batch import Batch
from skimp.core.exact import ExactChoices
from skimp.recipe import load_recipe
from skimp.run.build import build
from skimp.run.weights import init_scratch

STEPS, ROWS, SEQ, LAST = 300, 8, 64, 40
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "vocab_size": 256,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip


@cache
def text() -> torch.Tensor:
    whole = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()


def batch(step: int) -> Batch:
    draws = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text()) - SEQ - 1, (ROWS,), generator=draws)
    rows = torch.stack([text()[s : s + SEQ + 1] for s in starts.tolist()])
    positions = torch.arange(SEQ).expand(ROWS, SEQ).contiguous()
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, ((0, SEQ),) * ROWS, ROWS * SEQ)


@cache
def learned(*overrides: str, lr: float = 3e-3) -> float:
    """Mean loss of the last steps at a rate that is warmed up and then constant."""
    values: dict[str, Any] = {
        "model": "tiny", "data": {"train": "pydoc", "seq_len": SEQ, "validation": None}, "output": "runs/x",
        "train": {"steps": STEPS, "batch_tokens": ROWS * SEQ, "lr": lr, "clip": None}, "eval": None,
    }  # fmt: skip
    recipe = load_recipe(values, ("exact.kernels=plain", *overrides))
    run = build(recipe, ExactChoices(ROWS), CONFIG, fill=lambda model: init_scratch(model, 0))
    losses = []
    for step in range(STEPS):
        run.set_lr(lr * min(1.0, (step + 1) / 20))
        losses.append(run.step(batch(step)).loss)
    run.close()
    return sum(losses[-LAST:]) / LAST


@pytest.mark.slow
def test_a_projection_of_half_the_inputs_learns_as_full_training_does_and_less_learns_less() -> None:
    """Each at a rate of its own: projected moves are scaled by a quarter."""
    full = learned()
    half, eighth = (learned(f"optimizer={{name: compact, rank: {rank}}}", lr=1e-2) for rank in (0.5, 0.125))
    print(f"adamw {full:.3f}, compact 1/2 {half:.3f}, 1/8 {eighth:.3f}")
    assert half < 1.05 * full
    assert half < eighth < 1.15 * full


@pytest.mark.slow
def test_few_tokens_for_queries_keys_and_values_learn_most_of_what_all_do() -> None:
    """Measured: 2.175 with all tokens, 2.244 with 32 of 512, 2.362 with 8, 2.455 where the three do not train."""
    full = learned()
    found = {one_of: learned(f"activations.pamm={one_of}") for one_of in (16, 64)}
    print(f"adamw {full:.3f}, pamm {found}")
    assert full < found[16] < 1.05 * full
    assert found[16] < found[64] < 1.11 * full
