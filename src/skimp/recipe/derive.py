"""Defaults that follow from other keys, filled in first, so that the recipe holds what the run will do."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

from skimp.recipe.fields import whole

#: Four rows are the smallest step at which accumulation, packing and the planner's micro-batch all mean
#: something.
DEFAULT_ROWS = 4
DEFAULT_SEQ_LEN = 512
DEFAULT_WSD_DECAY = 0.2


def fill(raw: dict[Any, Any]) -> dict[Any, Any]:
    """A copy of the raw recipe with derived defaults.

    - `train.epochs` is 1 when neither it nor `train.steps` is given;
    - `train.batch_tokens` is four rows of `data.seq_len` when not given;
    - `train.decay` is 0.2 for the wsd schedule when not given;
    - `budget: 2GB` is the host's where the run computes on the CPU, else the device's; null is no limit;
    - `eval` is null when `data.validation` is null and `eval` is not written: there is nothing to evaluate
      on.

    Values of the wrong type are left as they are for validation to name.
    """
    filled = dict(raw)
    train = filled.get("train", {})
    data = filled.get("data")
    if isinstance(train, dict):
        train = dict(train)
        if train.get("steps") is None and train.get("epochs") is None:
            train["epochs"] = 1.0
        if "batch_tokens" not in train:
            train["batch_tokens"] = DEFAULT_ROWS * _seq_len(data)
        if train.get("schedule") == "wsd" and train.get("decay") is None:
            train["decay"] = DEFAULT_WSD_DECAY
        filled["train"] = train
    if isinstance(data, dict) and data.get("validation", 0) is None and "eval" not in filled:
        filled["eval"] = None
    budget = filled.get("budget", {})
    if budget is None:
        filled["budget"] = {}
    elif not isinstance(budget, dict) and isinstance(budget, (str, int, float)):
        filled["budget"] = {"host" if str(filled.get("device", "cpu")).strip().lower() == "cpu" else "device": budget}
    return filled


def _seq_len(data: Any) -> int:
    if not isinstance(data, dict) or data.get("seq_len") is None:
        return DEFAULT_SEQ_LEN
    try:
        return max(int(whole(data["seq_len"])), 1)
    except PydanticCustomError:  # named by validation, under its own key
        return DEFAULT_SEQ_LEN
