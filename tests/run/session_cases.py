"""Whole sessions on a tiny model: its folder, its text, a recipe, a plan made once for each kind of run."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skimp.run.voice import Progress, Voice

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "with",
    "statement",
    "python",
    "memory",
    "model",
    "token",
    "loss",
    "row",
    "step",
    "value",
    "in",
    "is",
    "was",
    "for",
]
VOCABULARY, SEQ = 320, 32


class Heard(Voice):
    """Remembers what it is told; sends this process a signal after a step."""

    def __init__(self, stop_at: int | None = None, number: int = signal.SIGTERM) -> None:
        self.said: list[str] = []
        self.steps: list[Progress] = []
        self.plans: list[Any] = []
        self.stop_at, self.number = stop_at, number

    def say(self, text: str) -> None:
        self.said.append(text)

    def planned(self, plan: Any) -> None:
        self.plans.append(plan)

    def step(self, progress: Progress) -> None:
        self.steps.append(progress)
        if progress.step == self.stop_at:
            os.kill(os.getpid(), self.number)


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60))) for _ in range(count)]


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder: tied Llama, 2 blocks, hidden 64, vocabulary 320, 128 positions; 300 tokens."""
    import torch
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("tiny")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([" ".join(WORDS)] * 4, vocab_size=300, special_tokens=["<end>"], show_progress=False)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("text") / "text.jsonl", make_texts(120))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIMP_CACHE", str(shared_cache))
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")


@pytest.fixture
def recipe(tmp_path: Path, tiny_folder: Path, text_file: Path) -> dict[str, Any]:
    """Six steps of four rows; every exact choice pinned, so that planning it takes few simulations."""
    return {
        "model": str(tiny_folder),
        "data": {"train": str(text_file), "seq_len": SEQ, "validation": 0.1},
        "train": {"steps": 6, "batch_tokens": 4 * SEQ, "lr": 1e-2, "warmup": 1},
        "optimizer": "adamw",
        "eval": {"tokens": 256},
        "exact": {"micro_batch": 2, "recompute": 1, "in_backward": False, "loss_chunk": 64},
        "report": False,
        "output": str(tmp_path / "run"),
    }


_PLANS: dict[str, Any] = {}


@pytest.fixture
def plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real planner plans one run; another kind of run gets that plan with its own full simulation in it.

    The planner costs seconds and has tests of its own; every choice is pinned here: nothing is searched.
    """
    import skimp.api
    from skimp.core.exact import ExactChoices
    from skimp.plan.simulate import simulate

    real = skimp.api.plan_recipe

    def remembered(recipe: Any, source: Any, **options: Any) -> Any:
        kind = [recipe.as_dict()[k] for k in ("optimizer", "precision", "budget", "exact", "eval", "adapter")]
        kind.append(recipe.as_dict()["model"]["weights"])
        key = json.dumps([kind, recipe.data.seq_len, recipe.train.batch_tokens, recipe.train.clip])
        if not _PLANS:
            _PLANS["first"] = _PLANS[key] = real(recipe, source, **options)
        pins = recipe.exact
        if key not in _PLANS and None in (pins.micro_batch, pins.recompute, pins.in_backward):
            _PLANS[key] = real(recipe, source, **options)
        if key not in _PLANS:
            exact = ExactChoices(pins.micro_batch, tuple(range(pins.recompute)), pins.loss_chunk, pins.in_backward)
            if pins.offload.blocks is not None:
                exact = replace(exact, offload=tuple(range(pins.offload.blocks)), offload_to=pins.offload.activations)
            if pins.offload.optimizer not in (None, "none"):
                exact = replace(exact, states=pins.offload.optimizer)
            profile = simulate(recipe, exact, source.config)
            _PLANS[key] = replace(_PLANS["first"], exact=exact, profile=profile)
        return _PLANS[key]

    monkeypatch.setattr(skimp.api, "plan_recipe", remembered)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with dotted keys replaced."""
    made = json.loads(json.dumps(base))
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = made
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fingerprints(folder: Path, step: int) -> dict[str, str]:
    """SHA-256 of the tensor files of a checkpoint."""
    saved = folder / "checkpoints" / f"step-{step:08d}"
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(saved.glob("*.safetensors"))}
