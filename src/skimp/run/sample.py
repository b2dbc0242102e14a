"""One short text from the model, before and after training: greedy, so that the two can be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from skimp.core.errors import ModelError
from skimp.core.read import read
from skimp.run.build import Run


def in_child(tokenizer: str, request: dict[str, Any]) -> Any:
    """Encode or decode in a child process: the training process never loads a tokenizer.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    done = subprocess.run(
        [sys.executable, "-m", "skimp.data.text", tokenizer], input=json.dumps(request), capture_output=True,
        text=True, check=False,
    )
    if done.returncode:
        raise ModelError(f"text through the tokenizer {tokenizer}", done.stderr.strip().splitlines()[-1:] and
                         done.stderr.strip().splitlines()[-1] or f"exit status {done.returncode}")
    return json.loads(done.stdout)


@torch.no_grad()
def greedy(run: Run, prompt: list[int], tokens: int, end: int | None) -> list[int]:
    """The `tokens` most likely ids after `prompt`, stopping at `end`.

    Each token runs the whole text again, at most prompt + tokens of them: a few dozen, where a cache would not pay.
    """
    ids = list(prompt)
    run.model.eval()
    try:
        for _ in range(tokens):
            row = torch.tensor([ids])
            hidden = run.head.hidden(row, torch.arange(len(ids)).unsqueeze(0), None)
            logits = torch.nn.functional.linear(hidden[:, -1].float(), run.head.weight.float(), run.head.bias)
            following = int(read(logits.argmax(), expect=0.0))
            if following == end:
                break
            ids.append(following)
    finally:
        run.model.train()
    return ids[len(prompt) :]


