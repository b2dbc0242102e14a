"""Update rules outside skimp's own loop: a plain torch loop, Hugging Face's Trainer, and FSDP2 on two
processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skimp.optim import AdamW, AdamW8bit, AdamWBF16, decay_groups

RULES: dict[str, Any] = {"adamw": AdamW, "adamw8bit": AdamW8bit, "adamw-bf16": AdamWBF16}
HERE = Path(__file__).resolve().parent


def rows(step: int, vocab: int = 256) -> torch.Tensor:
    return torch.randint(0, vocab, (3, 19), generator=torch.Generator().manual_seed(step))


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> list[float]:
    """As in every tutorial; the same rows each time, so that the loss must fall."""
    losses = []
    for _ in range(steps):
        ids = rows(0)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_plain_loop_with_torchs_scheduler(make_tiny: Callable[..., Any], name: str, family: str) -> None:
    model = make_tiny(family)
    if name == "adamw-bf16":
        model = model.to(torch.bfloat16)
    optimizer = RULES[name](decay_groups(model.named_parameters(), 0.1), lr=1e-2)
    losses = plain_loop(model, optimizer)
    assert losses[-1] < 0.7 * losses[0]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] > 5e-3


def test_plain_loop_equals_torchs_adamw(make_tiny: Callable[..., Any]) -> None:
    found, expected = make_tiny("llama"), make_tiny("llama")
    ours = plain_loop(found, AdamW(found.named_parameters(), lr=1e-3, weight_decay=0.1))
    theirs = plain_loop(expected, torch.optim.AdamW(expected.parameters(), lr=1e-3, weight_decay=0.1, fused=True))
    assert ours == theirs
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_hugging_face_trainer_takes_it(make_tiny: Callable[..., Any], tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    import transformers

    data = [{"input_ids": rows(i)[0], "labels": rows(i)[0]} for i in range(8)]

    def train(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[nn.Module, float]:
        model = make_tiny("llama")
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            seed=3,
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, optimizers=(make(model), None))
        return model, trainer.train().training_loss

    model, loss = train(lambda m: RULES[name](m.named_parameters(), lr=1e-3, weight_decay=0.0))
    other, expected = train(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.0, fused=True))
    if name == "adamw":
        assert loss == expected
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    else:
        assert loss == pytest.approx(expected, rel=2e-3)
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def run_processes(rule: str, world: int, folder: Path) -> dict[str, Any]:
    out = folder / f"world-{world}.pt"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "sharded_step.py"), rule]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder / f"store-{world}"), str(out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        texts = [child.communicate(timeout=300)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * world, "\n".join(texts)
    result: dict[str, Any] = torch.load(out, weights_only=True)
    return result


@pytest.mark.slow
def test_two_processes_of_fsdp2_equal_one(tmp_path: Path) -> None:
    one, two = run_processes("AdamW", 1, tmp_path), run_processes("AdamW", 2, tmp_path)
    assert one["weights"].keys() == two["weights"].keys()
    for name, weight in one["weights"].items():
        # Gradients are means of two halves instead of one mean; Adam turns a rounding of a gradient near
        # zero into a part of lr = 1e-2.
        torch.testing.assert_close(two["weights"][name], weight, rtol=0.0, atol=2e-5)
    assert two["state"] < 0.6 * one["state"]
