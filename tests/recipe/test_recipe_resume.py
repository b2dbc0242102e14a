from __future__ import annotations

import json
from typing import Any

import pytest

from skimp.core.errors import CheckpointError
from skimp.recipe import fingerprint, load_recipe, may_change_on_resume
from skimp.recipe.resume import flatten

FIXED = [
    "model=gpt2",
    "model.seed=1",
    "precision=bf16",
    "data.train=other.jsonl",
    "data.seed=1",
    "data.packing=false",
    "train.batch_tokens=4096",
    "train.lr=1e-3",
    "train.schedule=linear",
    "train.warmup=3",
    "train.min_lr=0.1",
    "train.clip=null",
    "train.weight_decay=0.1",
    "train.seed=5",
    "train.loss.z_loss=1e-4",
    "optimizer=adamw8bit",
    "optimizer.eps=1e-6",
    "auto=approximate",
]
FREE = [
    "train.steps=30",
    "train.spike.factor=3",
    "eval.every=5",
    "eval=null",
    "checkpoint.keep=3",
    "sample.prompt=Hello",
    "output=runs/moved",
    "budget=3GB",
    "exact.micro_batch=2",
    "exact.recompute=all",
    "device=cuda",
]


def plain(value: Any) -> str:
    return (
        json.dumps(value)
        if value is None or isinstance(value, bool)
        else str(value)
        if not isinstance(value, str)
        else repr(value)
    )


@pytest.mark.parametrize("change", FIXED)
def test_mathematics_may_not_change(raw: dict[str, Any], change: str) -> None:
    old = load_recipe(raw, ["train.steps=20"])
    new = load_recipe(raw, ["train.steps=20", change])
    assert fingerprint(old) != fingerprint(new)
    with pytest.raises(CheckpointError) as caught:
        may_change_on_resume(old, new)
    key = change.partition("=")[0]
    key = f"{key}.name" if key in ("model", "optimizer") else key
    message = str(caught.value)
    before, after = flatten(old.as_dict())[key], flatten(new.as_dict())[key]
    assert f"{key}: {plain(before)} -> {plain(after)}" in message
    assert "change only train.steps, train.epochs, train.spike, eval, checkpoint" in message


@pytest.mark.parametrize("change", FREE)
def test_how_and_how_long_may_change_and_it_says_which_value_is_used(raw: dict[str, Any], change: str) -> None:
    old = load_recipe(raw, ["train.steps=20"])
    new = load_recipe(raw, ["train.steps=20", change])
    assert fingerprint(old) == fingerprint(new)
    said = may_change_on_resume(old, new)
    assert said
    assert all("the new value is used" in sentence for sentence in said)
    assert any(sentence.startswith(change.partition("=")[0]) for sentence in said)


def test_equal_recipes_say_nothing(raw: dict[str, Any]) -> None:
    assert may_change_on_resume(load_recipe(raw), load_recipe(raw)) == []


def test_longer_is_allowed_and_the_schedule_is_spoken_of(raw: dict[str, Any]) -> None:
    old, new = load_recipe(raw, ["train.steps=20"]), load_recipe(raw, ["train.steps=40"])
    (said,) = may_change_on_resume(old, new)
    assert said.startswith("train.steps: 20 -> 40; the new value is used")
    assert "the cosine schedule is laid over the new length" in said
    flat = ["train.schedule=constant", "train.warmup=2"]
    (said,) = may_change_on_resume(
        load_recipe(raw, ["train.steps=20", *flat]), load_recipe(raw, ["train.steps=40", *flat])
    )
    assert said == "train.steps: 20 -> 40; the new value is used"
    assert may_change_on_resume(load_recipe(raw, ["train.epochs=1"]), load_recipe(raw, ["train.epochs=2"]))


def test_shorter_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"train.steps: 20 -> 10, which is shorter"):
        may_change_on_resume(load_recipe(raw, ["train.steps=20"]), load_recipe(raw, ["train.steps=10"]))
    with pytest.raises(CheckpointError, match=r"train.epochs: null -> 1.0"):
        may_change_on_resume(load_recipe(raw, ["train.steps=20"]), load_recipe(raw))


def test_every_changed_key_is_named(raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        may_change_on_resume(load_recipe(raw), load_recipe(raw, ["train.lr=1e-3", "data.seed=7", "budget=1GB"]))
    message = str(caught.value)
    assert "train.lr: 2e-05 -> 0.001" in message
    assert "data.seed: 0 -> 7" in message
    assert "budget.host" not in message


def test_fingerprint_is_plain_and_stable(raw: dict[str, Any]) -> None:
    one, two = fingerprint(load_recipe(raw)), fingerprint(load_recipe(load_recipe(raw).as_dict()))
    assert one == two
    assert len(one["digest"]) == 64
    assert "train.steps" not in one
    assert one["train.lr"] == 2e-5
