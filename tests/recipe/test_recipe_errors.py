"""The text of every refusal: full key, what was found, what is allowed, the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skimp.core.errors import RecipeError
from skimp.recipe import load_recipe
from skimp.recipe.problem import RecipeErrors


def refusal(raw: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(raw, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("train.stpes=20", ["train.stpes: no such key", "found:   20", "did you mean 'steps'"]),
        ("modle=x", ["modle: no such key", "did you mean 'model'?"]),
        (
            "train.loss.smoothing=0.1",
            ["train.loss.smoothing: no such key", "did you mean 'label_smoothing'?"],
        ),
        ("eval.early_stop.patients=3", ["eval.early_stop.patients: no such key", "did you mean 'patience'?"]),
        ("model.nmae=3", ["model.nmae: no such key", "did you mean 'name'?"]),
        ("optimizer.epsilon=1e-6", ["optimizer.epsilon: no such key", "'eps'"]),
        ("seq_len=4", ["seq_len: no such key", "did you mean 'data.seq_len'?"]),
        (
            "trust_remote_code=true",
            ["trust_remote_code: not accepted", "code from a model repository would run"],
        ),
        ("model.trust_remote_code=true", ["model.trust_remote_code: not accepted"]),
        ("train.gradient_accumulation_steps=4", ["not accepted", "train.batch_tokens"]),
        ("train.steps=twenty", ["train.steps: a whole number", "found:   'twenty'"]),
        ("train.steps=true", ["train.steps: a whole number", "found:   true"]),
        ("train.steps=1.5", ["train.steps: a whole number", "found:   1.5"]),
        ("train.steps=0", ["train.steps: a number at least 1", "found:   0", "Optimizer steps."]),
        ("train.lr=fast", ["train.lr: a number", "found:   'fast'"]),
        ("train.lr=0", ["train.lr: a number above 0"]),
        ("train.lr=yes", ["train.lr: a number", "found:   true"]),
        ("train.lr=.inf", ["train.lr: a finite number"]),
        ("train.lr=null", ["train.lr: ", "nothing (null)"]),
        ("train.min_lr=1.5", ["train.min_lr: a number at most 1"]),
        ("train.loss.label_smoothing=1", ["train.loss.label_smoothing: a number below 1"]),
        ("train.schedule=cosin", ["one of cosine, linear, constant, wsd", "did you mean 'cosine'?"]),
        ("train.schedule=no", ["train.schedule: one of", "found:   false"]),
        (
            "train.warmup=1.5",
            ["train.warmup: a whole number of steps, or a fraction", "0.05 for a twentieth"],
        ),
        ("train.warmup=-1", ["train.warmup: a whole number of steps"]),
        ("train=5", ["train: a mapping of keys to values", "found:   5", "its keys are steps, epochs"]),
        ("train=null", ["train: a mapping of keys to values", "nothing (null)"]),
        ("precision=fp16", ["precision: one of fp32, bf16-mixed, bf16", "'fp16'"]),
        ("auto=aproximate", ["auto: one of", "did you mean 'approximate'?"]),
        ("model=7", ["model: a mapping of keys to values", "found:   7"]),
        ("model.init=random", ["model.init: one of pretrained, scratch"]),
        ("model.name=''", ["model.name: text that is not empty"]),
        ("output=2024-01-01", ["output: text", 'put it in quotes: "2024-01-01"']),
        ("data.train=[]", ["data.train: a file, folder, glob"]),
        ("data.train=[a.txt, 3]", ["data.train: a file, folder, glob"]),
        ("data.validation=1000", ["data.validation: a fraction between 0 and 1", "data.validation_tokens"]),
        ("data.validation=true", ["data.validation: a fraction between 0 and 1"]),
        ("data.packing=1", ["data.packing: true or false"]),
        ("data.too_long=cut", ["data.too_long: one of auto, split, truncate, drop, error"]),
        ("data.encoding=utf9", ["data.encoding: a character encoding", "utf-8"]),
        ("data.seq_len=1", ["data.seq_len: a number at least 2"]),
        ("budget=2 gigs", ["budget: a size in bytes", "found:   '2 gigs'", "2GB, 1.5GiB or 512MB"]),
        ("budget=2", ["budget: a size in bytes", "no run fits below 1 MB", "2GB"]),
        ("budget=true", ["budget: a size in bytes", "true"]),
        ("budget={host: -1GB}", ["budget.host: a size in bytes"]),
        ("budget={cpu: 1GB}", ["budget.cpu: no such key"]),
        ("optimizer=adam8bit", ["optimizer.name: an update rule", "did you mean 'adamw8bit'"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas", "[0.9]"]),
        ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas[1]: a number at least 0 and below 1"]),
        ("exact.recompute=nome", ["exact.recompute: none, all, a number of blocks", "did you mean 'none'?"]),
        ("exact.recompute=-1", ["exact.recompute: none, all", "keep every activation"]),
        ("exact.recompute=[0, -1]", ["exact.recompute: none, all", "block indices start at 0"]),
        ("exact.keep=atention", ["exact.keep: nothing, attention, products", "did you mean 'attention'?"]),
        ("exact.keep=[]", ["exact.keep: nothing, attention, products", "write keep: [nothing"]),
        ("exact.keep=[nothing]", ["exact.keep: a word for each recomputed block", "exact.recompute=1"]),
        ("exact.recompute={a: 1}", ["exact.recompute: none, all", "a mapping with a"]),
        ("exact.in_backward=2", ["exact.in_backward: true or false"]),
        ("exact.micro_batch=5", ["exact.micro_batch: at most 4 rows", "2048 / data.seq_len 512 = 4 rows"]),
        ("sample.tokens=5", ["sample.prompt: needed"]),
        ("sample.prompt=42", ["sample.prompt: text", 'put it in quotes: "42"']),
        ("checkpoint.keep=0", ["checkpoint.keep: a number at least 1"]),
        ("device=rtx-4099", ["device: cpu, cuda, or a card", "rtx-4099", "rtx-4090"]),
        ("budget.device=8GB", ["budget.device: null, when device is cpu", "budget.host=8000000000"]),
        ("eval.keep_best=true", ["eval.keep_best: eval.every beside it", "eval.every=100"]),
        ("eval.early_stop={}", ["eval.early_stop: eval.every beside it"]),
        ("train.decay=0.3", ["train.decay: null, unless train.schedule is wsd", "would be ignored"]),
    ],
)
def test_one_wrong_key(raw: dict[str, Any], override: str, texts: list[str]) -> None:
    message = refusal(raw, override)
    assert "problems" not in message, message
    for text in texts:
        assert text in message, message
    assert f"(from the command line: {override})" in message or "sample.prompt: needed" in message, message


def test_batch_tokens_must_be_whole_rows(raw: dict[str, Any]) -> None:
    message = refusal(raw, "data.seq_len=512", "train.batch_tokens=1300")
    assert "train.batch_tokens: a multiple of data.seq_len" in message
    assert "found:   train.batch_tokens 1300, data.seq_len 512" in message
    assert "instead: train.batch_tokens 1024 or 1536" in message
    assert "instead: train.batch_tokens 512" in refusal(raw, "train.batch_tokens=3")


def test_steps_or_epochs_not_both(raw: dict[str, Any]) -> None:
    message = refusal(raw, "train.steps=20", "train.epochs=2")
    assert "train.steps: either train.steps or train.epochs" in message
    assert "train.epochs=null or train.steps=null" in message
    assert load_recipe(raw, ["train.steps=20", "train.epochs=null"]).train.steps == 20


def test_schedules_that_contradict(raw: dict[str, Any]) -> None:
    assert "a constant schedule never falls" in refusal(raw, "train.schedule=constant", "train.min_lr=0.1")
    assert "found:   warmup 30, steps 20" in refusal(raw, "train.steps=20", "train.warmup=30")
    long = refusal(raw, "train.schedule=wsd", "train.decay=0.9", "train.warmup=0.2", "train.steps=10")
    assert "together they are longer than the run" in long
    assert "train.decay=0.8 or less" in long
    assert load_recipe(raw, ["train.schedule=wsd", "train.decay=0.9", "train.warmup=0.1"]).train.decay == 0.9


def test_evaluation_needs_held_out_text(raw: dict[str, Any]) -> None:
    message = refusal(raw, "data.validation=null", "eval.every=5")
    assert "eval: null, when data.validation is null" in message
    assert "there is no held-out text" in message
    saved = refusal(raw, "eval.every=5", "eval.keep_best=true", "checkpoint.at_end=false")
    assert "a run that never saves cannot keep its best state" in saved


def test_all_problems_at_once_with_their_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "quick.yaml"
    path.write_text(
        "model: smollm2-135m\n"
        "precison: fp32\n"
        "data: {train: pydoc, seq_len: long}\n"
        "optimizer:\n"
        "  betas: [0.9, 2.0]\n"
        "budget: lots\n"
        "train:\n"
        "  lr: 2e-5\n"
        "  schedule: cosin\n"
        "output: runs/q\n"
    )
    with pytest.raises(RecipeErrors) as caught:
        load_recipe(path, ["train.clip=-1"])
    keys = [p.key for p in caught.value.problems]
    assert keys == [
        "precison",
        "data.seq_len",
        "optimizer.betas[1]",
        "budget",
        "train.schedule",
        "train.clip",
    ]
    message = str(caught.value)
    assert message.startswith(f"{path}: 6 problems\n")
    for key, line in (("precison", 2), ("data.seq_len", 3), ("optimizer.betas[1]", 5), ("budget", 6)):
        (row,) = [r for r in message.splitlines() if r.startswith(f"{key}:")]
        assert row.endswith(f"({path}, line {line})")
    assert "(from the command line: train.clip=-1)" in message


def test_a_default_is_not_reported_when_its_neighbour_is_wrong(raw: dict[str, Any]) -> None:
    message = refusal(raw, "data.seq_len=long")
    assert "problems" not in message
    assert "batch_tokens" not in message
