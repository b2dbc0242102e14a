"""What a merge of an adapter and a base that was kept in a codec costs: held-out loss as trained, and as written.

Two merges are possible, and neither is the other's rounding. Onto the dequantised weights, those that training saw: the
model as it was trained, to the rounding of the dtype. Onto the original weights: the codec's error, which the adapter
was trained to make up for, is gone from under it. Coding the sum again is no merge: steps between levels are larger
than most changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from skimp.core.errors import DataError
from skimp.run.adapted import AdaptedTensors
from skimp.run.evaluation import choose_way, score
from skimp.run.found import Found, find
from skimp.run.held_out import held_out
from skimp.run.opened import open_model, settle_dtype

#: Tokens of held-out text that both are scored on, at most: a few seconds of a 135M model.
TOKENS = 4096
RULES = {
    "dequantised": "merged onto the dequantised weights, those that training saw",
    "original": "merged onto the original weights, without the codec's error that the adapter was trained with",
}


def choose(found: Found, onto: str | None) -> str | None:
    """Set what the adapter goes onto; the choice, or None where the base was never coded.

    Raises:
        ConflictError: `onto` asked of anything else than an adapter on a coded base.
    """
    stored = found.stored
    if onto is None and not (isinstance(stored, AdaptedTensors) and stored.kept_in is not None):
        return None
    which = onto or "dequantised"
    if not isinstance(stored, AdaptedTensors):
        AdaptedTensors.refuse_onto(which)
    stored.onto(which)
    return which


def loss_change(found: Found, target: Path, onto: str) -> dict[str, Any]:
    """Held-out loss of the adapter as trained and of what was written, one after the other: one model at a time.

    Returns:
        {"onto", "rule", "codec", "trained", "written", "change", "tokens"}; without the numbers, and with "why", where
        the run holds no text out.
    """
    stored = found.stored
    assert isinstance(stored, AdaptedTensors)
    facts: dict[str, Any] = {"onto": onto, "rule": RULES[onto], "codec": stored.kept_in.meta()}
    try:
        text = held_out(found, [])
    except DataError as error:
        return {**facts, "why": error.found}
    dtype = settle_dtype(found, None)
    way = choose_way(found, dtype, text.seq_len, None)
    rows = next(iter(text.sets.values()))
    limit = max(1, TOKENS // text.seq_len)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    stored.onto("dequantised")
    one = score(open_model(found, precision), rows, "", way, limit)
    stored.onto(onto)
    with find(str(target)) as written:
        two = score(open_model(written, precision), rows, "", way, limit)
    return {**facts, "trained": one.loss, "written": two.loss, "change": two.loss - one.loss, "tokens": one.tokens}


def sentence(facts: dict[str, Any]) -> str:
    """What a person reads."""
    said = f"base kept in {facts['codec']['codec']}: {facts['rule']}"
    if "why" in facts:
        return f"{said}; the change of loss was not measured: {facts['why']}"
    return (
        f"{said}; held-out loss {facts['trained']:.4f} as trained, {facts['written']:.4f} as written "
        f"({facts['change']:+.4f}) on {facts['tokens']:,} tokens"
    )
