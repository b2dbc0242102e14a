"""Sizes of the fine-tuning benchmark, and what each method is in a recipe.

Learning rates are walked as in the pre-training benchmark (`profiles.due`), each method around a rate of its own; the
loss on the dev part decides, and the test part is scored once a run and never looked at before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skimp.bench.tasks import Sizes
from skimp.core.errors import SkimpError, did_you_mean
from skimp.core.registry import methods

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FULL, BASE = "full", "base"
#: Methods that are an adapter on a coded base: name -> (adapter, codec).
ON_CODES = {"qlora": ("lora", "nf4")}
#: Rates of a method over that of LoRA: what trains few or shared numbers moves further in a step.
FASTER = {FULL: 0.1, "s2ft": 0.3, "sst": 0.3, "s2a": 3.0}


@dataclass(frozen=True)
class Grown:
    """A small Llama that is pre-trained for the purpose, on Python's documentation, some of its source, and sums.

    Attributes:
        vocab, hidden, inner, blocks, heads: its sizes; embedding and head are tied.
        tokens, batch_tokens, lr: of the pre-training.
        characters: of documentation, and half as many of source.
        rounds: how often every sum comes in the text.
    """

    vocab: int
    hidden: int
    inner: int
    blocks: int
    heads: int
    tokens: int
    batch_tokens: int
    lr: float
    characters: int
    rounds: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the pre-training."""
        return self.tokens // self.batch_tokens

    def config(self, positions: int) -> dict[str, Any]:
        """config.json of the model."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": positions,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "rms_norm_eps": 1e-6,
        }


@dataclass(frozen=True)
class Tuning:
    """One size of the benchmark.

    Attributes:
        model: a recipe's model name, or what is pre-trained first.
        seq, batch_tokens, steps: of a fine-tuning.
        usual: LoRA's middle rung; others start at `FASTER` times it, on the nearest rung.
        rank: of low-rank additions. reduce: of side networks. heads: of the model, one of which s2ft trains.
        sizes: of the three tasks. answer: new tokens at most.
        rungs: how many neighbouring rates a method starts with.
        methods, seeds: what is run where nothing is said; no methods: full fine-tuning and every adapter.
    """

    name: str
    model: str | Grown
    seq: int
    batch_tokens: int
    steps: int
    usual: float
    rank: int
    reduce: int
    heads: int
    sizes: Sizes
    answer: int = 48
    rungs: int = 3
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)

    def digest(self, found: str) -> str:
        """What results of this profile on these items and texts have in common; others are never mixed in."""
        facts = {key: value for key, value in asdict(self).items() if key not in ("methods", "seeds", "rungs")}
        return hashlib.sha256(json.dumps([facts, found]).encode()).hexdigest()[:16]

    def rate(self, method: str) -> float:
        """The rung that a method's search starts around."""
        wanted = self.usual * FASTER.get(method, 1.0)
        return min(LADDER, key=lambda rung: abs(rung / wanted - 1))


_TINY = Grown(2048, 128, 344, 4, 4, 1_500_000, 2048, 5e-3, 1_500_000, 100)
_SHORT = Grown(1024, 96, 256, 4, 4, 800_000, 2048, 5e-3, 600_000, 80)
_SECONDS = Grown(512, 32, 88, 2, 2, 8192, 512, 5e-3, 20_000, 2)
#: For the real model: full fine-tuning, LoRA and its kin, on 4 bits, slices, and beside the model.
SIX = (FULL, "lora", "olora", "qlora", "s2ft", "qst")

TUNINGS: dict[str, Tuning] = {
    t.name: t
    for t in (
        Tuning("seconds", _SECONDS, 128, 512, 4, 3e-3, 4, 2, 2, Sizes(40, 8, 12, 9), 24, 2, ("full", "lora"), (0,)),
        Tuning("short", _SHORT, 128, 1024, 120, 1e-2, 8, 3, 4, Sizes(1200, 100, 200, 20), rungs=2, seeds=(0, 1)),
        Tuning("tiny", _TINY, 128, 2048, 200, 1e-2, 8, 4, 4, Sizes(2400, 150, 300, 20)),
        Tuning("smollm2", "smollm2-135m", 128, 1024, 24, 1e-3, 16, 16, 9, Sizes(600, 60, 100, 50), 56, 2, SIX, (0,)),
    )
}
#: What a name stands for when it is more than one.
TOGETHER = {"default": ("tiny", "smollm2")}


def tunings_of(name: str) -> list[Tuning]:
    """The profiles that a name stands for.

    Raises:
        SkimpError: there is none; says the nearest.
    """
    known = [*TOGETHER, *TUNINGS]
    if name not in known:
        raise SkimpError(f"bench profile '{name}'", "no such name", instead=did_you_mean(name, known))
    return [TUNINGS[part] for part in TOGETHER.get(name, (name,))]


def chosen(names: Sequence[str], profile: Tuning) -> list[str]:
    """The methods to run: those named, or the profile's own, or full fine-tuning and every adapter.

    Raises:
        SkimpError: a name that is no adapter, nor `full`, nor an adapter on codes.
    """
    known = [FULL, *(n for n, f in methods().items() if f.kind == "adapter"), *ON_CODES]
    for name in names:
        if name not in known:
            raise SkimpError(f"bench of method '{name}'", "no adapter", instead=did_you_mean(name, known))
    return list(dict.fromkeys(names)) or list(profile.methods) or known


def changes(method: str, profile: Tuning) -> dict[str, Any]:
    """The sections of a recipe that switch a method on.

    Ranks are the profile's. What happens every so many steps happens a few times a run: the defaults are for long ones.
    """
    if method == FULL:
        return {}
    name, codec = ON_CODES.get(method, (method, ""))
    facts = methods()[name]
    keys: dict[str, Any] = {"r": profile.rank} if "r" in (*facts.shared, *facts.options) else {}
    steps = profile.steps
    own: dict[str, dict[str, Any]] = {
        "relora": {"every": max(2, steps // 3), "warmup": steps // 30},
        "sst": {"every": max(2, steps // 6), "warmup": steps // 60},
        "s2ft": {"o": 1 / profile.heads + 1e-6, "d": 0.05},
        "qst": {"reduce": profile.reduce},
    }
    sections: dict[str, Any] = {"adapter": {"name": name, **keys, **own.get(name, {})}}
    if name == "gradnormlorp":
        rank = max(1, profile.rank // 2)
        sections["optimizer"] = {"name": "galore", "rank": rank, "refresh": max(1, steps // 10)}
    if codec:
        sections["model"] = {"weights": codec}
    return sections


def recipe_of(profile: Tuning, method: str, lr: float, seed: int, model: str, items: Path, output: Path) -> Any:
    """The recipe of a run. Exact choices are pinned, so that times and peaks of methods compare.

    Args:
        model: name or folder. items: folder of the tasks. output: folder of the run.
    """
    rows = profile.batch_tokens // profile.seq
    base: dict[str, Any] = {
        "model": {"name": model},
        "data": {
            "train": str(items / "train.jsonl"),
            "validation": str(items / "dev.jsonl"),
            "seq_len": profile.seq,
            "packing": True,
            "seed": seed,
        },
        "train": {
            "steps": profile.steps,
            "batch_tokens": profile.batch_tokens,
            "lr": lr,
            "warmup": 0.1,
            "min_lr": 0.1,
            "seed": seed,
        },
        "eval": {"at_start": False, "at_end": True},
        "checkpoint": {"every": max(1, min(50, profile.steps // 3)), "at_end": True, "keep": 1},
        "exact": {"micro_batch": min(rows, 8), "recompute": "none", "in_backward": False},
        "report": False,
        "output": str(output),
    }
    for key, value in changes(method, profile).items():
        base[key] = {**base.get(key, {}), **value}
    return base


def growing(profile: Tuning, model: str, text: Path, output: Path) -> dict[str, Any]:
    """The recipe of the pre-training that `profile.model` describes."""
    grown = profile.model
    assert isinstance(grown, Grown)
    rows = grown.batch_tokens // profile.seq
    return {
        "model": {"name": model, "init": "scratch", "seed": 0},
        "data": {"train": str(text), "seq_len": profile.seq, "packing": True, "validation": 0.02, "seed": 0},
        "train": {
            "steps": grown.steps,
            "batch_tokens": grown.batch_tokens,
            "lr": grown.lr,
            "warmup": 0.05,
            "min_lr": 0.1,
            "seed": 0,
        },
        "eval": {"at_start": False, "at_end": True, "tokens": 16384},
        "checkpoint": {"every": 50, "at_end": True, "keep": 1},
        "exact": {"micro_batch": rows, "recompute": "none", "in_backward": False},
        "report": False,
        "output": str(output),
    }
