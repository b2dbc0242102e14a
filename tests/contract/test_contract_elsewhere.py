"""Update rules outside skimp's own loop: a plain torch loop, Hugging Face's Trainer, and FSDP2 on two
processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sharded_step
import torch
from contract_rows import threads
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from skimp.optim import (
    CAME,
    SPAM,
    Adafactor,
    AdamMini,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdamWBF16,
    Dion,
    Lion,
    Muon,
    StableSPAM,
    role_groups,
    roles,
)

RULES: dict[str, Any] = {"adamw": AdamW, "adamw8bit": AdamW8bit, "adamw-bf16": AdamWBF16, "lion": Lion}
RULES |= {"adafactor": Adafactor, "came": CAME, "adam-mini": AdamMini, "adamw4bit": AdamW4bit, "muon": Muon}
RULES |= {"spam": SPAM, "stable-spam": StableSPAM, "dion": Dion}
HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps of a tiny model: a second thread costs more in waiting than it does in work."""
    with threads(1):
        yield


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
    lr = 1e-3 if name == "came" else 1e-2  # a CAME update is a few times larger than AdamW's while its β₃ settles
    optimizer = RULES[name](role_groups(model.named_parameters(), 0.1, roles(model)), lr=lr)
    losses = plain_loop(model, optimizer)
    assert losses[-1] < 0.7 * losses[0]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 2)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] > lr / 2


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


# ---------------------------------------------------------------------- FSDP2 on two processes
@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two processes of `sharded_step.py` found, every rule in one start, and the folder with checkpoints."""
    folder = tmp_path_factory.mktemp("sharded")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sharded_step.py"), str(rank), "2", str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [child.communicate(timeout=300)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(texts)
    return torch.load(folder / "found.pt", weights_only=True), folder


@pytest.fixture
def alone() -> Callable[[str], dict[str, Any]]:
    """The same steps without sharding."""

    return lambda rule: sharded_step.one_rule(rule, lambda net: None, None)


#: torch's fused AdamW takes what is left of a vector register with other instructions (no fused multiply-add): the
#: last numbers of a part of 20 may differ by an ulp from the same numbers in the middle of 40.
TAILS = {"block.0.weight", "block.0.bias", "block.3.bias", "head.bias"}
#: Rules whose states are blocks.
CODED = ("adamw8bit", "adamw4bit")
#: Parameters whose second shard begins in the middle of one of the blocks of the whole (66 rows of 40 numbers), or
#: that are small and follow one of those in `TAILS`.
CUT_BLOCKS = {"embedding.weight", "head.weight"}


@pytest.mark.parametrize("rule", sharded_step.RULES)
def test_two_processes_of_fsdp2_equal_one(sharded: Any, alone: Any, rule: str) -> None:
    """Same gradients, so the same weights: to the bit, but for tails of vectors and blocks that are cut otherwise."""
    one, two = alone(rule), sharded[0][rule]
    after = "two" if rule.startswith(CODED) else "three"  # the third step sees the weights that differ
    assert one[after].keys() == two[after].keys()
    for name, weight in one[after].items():
        moved = (weight - one["start"][name]).float().norm()
        assert moved > 0
        if rule.startswith(CODED) and name in CUT_BLOCKS:
            assert not torch.equal(two[after][name], weight)
            bound = 0.25 if rule == "adamw4bit" else 0.02  # noise and blocks of 128 lie elsewhere
            assert (two[after][name] - weight).float().norm() < bound * moved
        elif rule == "adamw" or (name in TAILS and not rule.endswith("bf16")):
            # Which tails differ hangs on the width of a register, and the third step's gradients follow them.
            torch.testing.assert_close(two[after][name], weight, rtol=2e-7, atol=2e-9)
        else:
            assert torch.equal(two[after][name], weight), name


@pytest.mark.parametrize("rule", sharded_step.RULES)
def test_fsdp2_with_clipping_equals_one_process(sharded: Any, alone: Any, rule: str) -> None:
    """The norm is summed in another order, and Adam divides by gradients that differ in the last bit."""
    one, two = alone(rule), sharded[0][rule]
    assert min(one["norms"]) > 20 * 0.05  # every step is clipped
    assert two["norms"] == pytest.approx(one["norms"], rel=2e-2 if rule.startswith(CODED) else 5e-7)
    for name, weight in one["clipped"].items():
        moved = (weight - one["start"][name]).float().norm()
        bound = 0.4 if rule == "adamw4bit" else 0.05 if rule.startswith("adamw8bit") else 1e-5
        assert (two["clipped"][name] - weight).float().norm() < bound * moved, name


@pytest.mark.parametrize("rule", sharded_step.RULES)
def test_fsdp2_resumes_from_a_distributed_checkpoint(sharded: Any, rule: str) -> None:
    """Saved by torch.distributed.checkpoint after two steps, loaded over other states: the third step bit for bit."""
    found = sharded[0][rule]
    assert all(torch.equal(found["resumed"][name], weight) for name, weight in found["three"].items())
    assert any(not torch.equal(found["two"][name], weight) for name, weight in found["three"].items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rule", ["adamw", "adamw-bf16"])
def test_a_checkpoint_of_two_processes_goes_on_in_one(sharded: Any, rule: str) -> None:
    net, optimizer = sharded_step.make(rule, lambda net: None)
    sharded_step.restore(net, optimizer, sharded[1] / rule)
    sharded_step.take(net, optimizer, range(2, sharded_step.STEPS))
    for name, weight in sharded_step.weights(net).items():
        torch.testing.assert_close(weight, sharded[0][rule]["three"][name], rtol=2e-7, atol=2e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_8_bit_states_change_processes_only_where_blocks_lie_alike(sharded: Any) -> None:
    """Where shards are whole blocks the checkpoint is that of one process; elsewhere loading stops: nothing is guessed.

    The number of blocks alone would not tell: two shards of 2,548 numbers are 10 blocks each, and both together 20 as
    well, in other places. So the shape has the number of shards.
    """
    found = sharded_step.even(lambda net: None, sharded[1], resume=True)
    assert torch.equal(found, sharded[0]["even"])
    net, optimizer = sharded_step.make("adamw8bit", lambda net: None)
    with pytest.raises(CheckpointException, match=r"Size mismatch .*absmax"):
        sharded_step.restore(net, optimizer, sharded[1] / "adamw8bit")


@pytest.mark.parametrize("rule", sharded_step.RULES)
def test_state_is_shared_out(sharded: Any, alone: Any, rule: str) -> None:
    """Rank 0 holds 66 of 131 rows, all of the matrix with one row, and half of the rest; the table says so."""
    one, two = alone(rule), sharded[0][rule]
    assert two["bytes"] == two["table"] < 0.61 * one["bytes"]
    assert one["bytes"] == one["table"]
