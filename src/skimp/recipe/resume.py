"""Which keys may change between a run and its resumption, and which would make it another run.

The rule is the house's own: what changes the mathematics of the steps already taken or still to come is
fixed; what changes only how, where and how long they are computed may change, and the message says which
value is used.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from skimp.core.errors import CheckpointError
from skimp.recipe.explain import shown
from skimp.recipe.schema import Recipe

#: A key, or a section with all its keys. Everything else is fixed.
MAY_CHANGE = (
    "train.steps",
    "train.epochs",
    "train.spike",
    "eval",
    "checkpoint",
    "sample",
    "log",
    "report",
    "output",
    "budget",
    "exact",
    "survive",
    "device",
)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'train': {'lr': 1}} -> {'train.lr': 1}; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)


def fingerprint(recipe: Recipe) -> dict[str, Any]:
    """What makes this run this run: every fixed key with its value, and `digest`, the SHA-256 of them all."""
    fixed = {key: value for key, value in flatten(recipe.as_dict()).items() if not _free(key)}
    text = json.dumps(fixed, sort_keys=True, ensure_ascii=False)
    return {**fixed, "digest": hashlib.sha256(text.encode()).hexdigest()}


def may_change_on_resume(old: Recipe, new: Recipe) -> list[str]:
    """Compare the recipe a run was started with to the one it is resumed with.

    Returns:
        One sentence for each key that changed and may, saying that the new value is used and what follows.

    Raises:
        CheckpointError: a fixed key changed, or the run was made shorter; names each with both values and
            lists the keys that may change.
    """
    before, after = flatten(old.as_dict()), flatten(new.as_dict())
    changed = [key for key in {**before, **after} if before.get(key, _ABSENT) != after.get(key, _ABSENT)]
    fixed = [f"{key}: {_said(before, key)} -> {_said(after, key)}" for key in changed if not _free(key)]
    fixed += _shorter(old, new)
    if fixed:
        raise CheckpointError(
            "resume this run",
            "its recipe changed: " + "; ".join(fixed),
            "these keys are part of the mathematics of the run, so the steps taken and those to come "
            "would not belong "
            "to one run",
            [
                "resume with the recipe of the run",
                "start another run in another output folder",
                "change only " + ", ".join(MAY_CHANGE) + " (train.steps and train.epochs only upward)",
            ],
        )
    return [_sentence(key, before, after, new) for key in changed]


_ABSENT = object()


def _said(values: dict[str, Any], key: str) -> str:
    value = values.get(key, _ABSENT)
    return "absent" if value is _ABSENT else "null" if value is None else shown(value)


def _shorter(old: Recipe, new: Recipe) -> list[str]:
    found = []
    for name in ("steps", "epochs"):
        before, after = getattr(old.train, name), getattr(new.train, name)
        if (before is None) != (after is None):
            found.append(
                f"train.{name}: {'null' if before is None else before} -> {'null' if after is None else after}"
            )
        elif before is not None and after < before:
            found.append(f"train.{name}: {before} -> {after}, which is shorter")
    return found


def _sentence(key: str, before: dict[str, Any], after: dict[str, Any], new: Recipe) -> str:
    text = f"{key}: {_said(before, key)} -> {_said(after, key)}; the new value is used"
    if key in ("train.steps", "train.epochs") and (new.train.schedule != "constant" or 0 < new.train.warmup < 1):
        text += (
            f", and the {new.train.schedule} schedule is laid over the new length: the learning rate of "
            "the coming steps "
            "differs from that of the shorter run"
        )
    if key == "device":
        text += "; the resumed steps are not bit-equal to those of the other device"
    return text
