"""One short text from the model, before and after training: greedy, so that the two can be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from skimp.core.child import child_environment
from skimp.core.errors import ModelError
from skimp.core.read import read
from skimp.run.build import Run


def in_child(tokenizer: str, request: dict[str, Any]) -> Any:
    """Encode or decode in a child process: the training process never loads a tokenizer.

    Args:
        tokenizer: a model folder, tokenizer.json or GGUF file.
        request: see `skimp.data.text.answer`.

    Raises:
        ModelError: the tokenizer cannot be read, or the child died; with its last words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "skimp.data.text", tokenizer],
        input=json.dumps(request).encode(),
        capture_output=True,
        check=False,
        env=child_environment(),
        start_new_session=True,  # Ctrl-C asks the loop to stop; it must not kill this child
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ModelError(
            f"text through the tokenizer {tokenizer}",
            f"its process ended with code {done.returncode}" + (f": {said[-1]}" if said else ""),
        )
    found = json.loads(done.stdout)
    if "error" in found:
        raise ModelError(**found["error"])
    return found


@torch.no_grad()
def greedy(run: Run, prompt: list[int], tokens: int, end: int | None) -> list[int]:
    """The `tokens` most likely ids after `prompt`, stopping at `end`.

    Each token runs the whole text again: a few dozen tokens, for which a cache would not pay.
    """
    ids = list(prompt)
    run.model.eval()
    try:
        for _ in range(tokens):
            row = torch.tensor([ids])
            hidden = run.head.hidden(row, torch.arange(len(ids)).unsqueeze(0), None)
            # A scale and a soft cap are left out: both are monotone, so the largest logit stays the largest.
            logits = torch.nn.functional.linear(hidden[:, -1], run.head.weight, run.head.bias)
            following = int(read(logits.argmax(), expect=0.0))
            if following == end:
                break
            ids.append(following)
    finally:
        run.model.train()
    return ids[len(prompt) :]
