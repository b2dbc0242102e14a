"""Every registered technique in Hugging Face `Trainer` and in TRL's `SFTTrainer`: equal to the same trainer without
it, and with less memory where memory is its business."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_cases
from trainer_cases import CASES, check

from skimp.core.registry import methods

pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install skimp[hf]")

COMPARED = [name for name, case in CASES.items() if case.than]
#: TRL 1.16 needs Python 3.11 and is left out by the extra below it.
TRL = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11")

#: Methods that are no choice of their own in a trainer.
WITHIN = {
    "float32": "what every rule and weight is stored as unless another codec is named",
    **dict.fromkeys(
        ("chunked-mlp", "coded-activations", "derivative", "pamm", "s2-attention", "momentum-reset"),
        "a wrapper or an event of skimp's own loop; `attach` has no key for it",
    ),
    "loftq": "its codes are fitted while each dense weight is read; `attach` meets a model that was read",
}


def test_every_method_has_a_case() -> None:
    """A new method is put into both trainers by adding a line to the table."""
    assert {m for case in CASES.values() for m in case.methods} | set(WITHIN) == set(methods())


@cache
def in_trainer(name: str) -> dict[str, Any]:
    if CASES[name].lora == "peft":
        pytest.importorskip("peft")
    return trainer_cases.run(name, trainer_cases.hf_trainer)


@pytest.mark.parametrize("name", COMPARED)
def test_trainer(name: str) -> None:
    check(name, in_trainer(name), in_trainer(CASES[name].than))


@pytest.fixture(scope="module")
def in_trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All cases in one child process: TRL, datasets and PEFT stay out of this one."""
    out = tmp_path_factory.mktemp("trl") / "found.pt"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(out.parent)}
    done = subprocess.run(
        [sys.executable, str(Path(trainer_cases.__file__)), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


@TRL
@pytest.mark.parametrize("name", [name for name in COMPARED if name in trainer_cases.IN_TRL])
def test_trl(in_trl: dict[str, Any], name: str) -> None:
    found, base = in_trl[name], in_trl[CASES[name].than]
    for side in (found, base):
        assert "error" not in side, side["error"]
    check(name, found, base)


@TRL
def test_trl_counts_each_token_once(in_trl: dict[str, Any]) -> None:
    """With clipping every batch goes through twice; TRL counts tokens in its loss."""
    assert in_trl["in-backward"]["tokens"] == in_trl["plain"]["tokens"]
    assert in_trl["padded"]["tokens"] == in_trl["whole"]["tokens"]
    assert in_trl["plain"]["tokens"][-1] > 0


def test_the_comparison_can_fail() -> None:
    """Another loss, a weight that stays, a peak that does not fall: each is seen."""
    base = in_trainer("plain")
    with pytest.raises(AssertionError):
        check("recompute", {**base, "losses": [*base["losses"][:-1], base["losses"][-1] * 1.01]}, base)
    with pytest.raises(AssertionError):
        check("recompute", {**base, "after": base["before"]}, base)
    with pytest.raises(AssertionError):
        check("recompute", base, base)
