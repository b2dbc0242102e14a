"""What each method of the fine-tuning benchmark is in a recipe, and the recipe of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skimp.bench.tuning import FULL, ON_CODES, Grown, Tuning
from skimp.core.registry import methods


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
