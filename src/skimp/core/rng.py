"""All random state a run may touch, as plain JSON values, bit exact.

About 17 kB of text: Python's Mersenne Twister (625 words), numpy's (624 words), torch's on the host (5,056
bytes) and 16 bytes for each CUDA device in use. Counter-based noise (`core.noise`) has no state and needs
none of this.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from skimp.core.errors import CheckpointError, SkimpError


def seed_everything(seed: int) -> None:
    """Seed Python, numpy's global generator and torch on every device.

    Args:
        seed: 0 <= seed < 2^63. numpy takes 32 bits and gets the low ones.

    Raises:
        SkimpError: out of range.
    """
    if isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise SkimpError("a seed", f"{seed!r}", "generators take 63 bits", "a whole number from 0 to 2^63 - 1")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA too: at once, or when it is first used


def capture() -> dict[str, Any]:
    """The state of every global generator; JSON-able. Does not start CUDA when the run has not."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": np.asarray(keys, dtype="<u4").tobytes().hex(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached).hex(),
        },
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in cuda],
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` gave, also after a passage through JSON.

    Raises:
        CheckpointError: a part is missing or malformed, or the state has more CUDA devices than there are
            here. Nothing is changed then.
    """
    try:
        python, numpy = state["python"], state["numpy"]
        words = (python["version"], tuple(python["words"]), python["gauss"])
        keys = np.frombuffer(bytes.fromhex(numpy["keys"]), dtype="<u4").astype(np.uint32)
        legacy = (numpy["kind"], keys, numpy["position"], numpy["has_gauss"], float.fromhex(numpy["cached"]))
        host = _tensor(state["torch"])
        cuda = [_tensor(text) for text in state["cuda"]]
        if host.numel() != torch.get_rng_state().numel():
            raise ValueError(f"torch's state has {host.numel()} bytes")
        random.Random().setstate(words)
        np.random.RandomState().set_state(legacy)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            "restoring the random state", f"{type(error).__name__}: {error}", "it is not what capture() gives"
        ) from error
    here = torch.cuda.device_count() if cuda else 0
    if len(cuda) > here:
        raise CheckpointError(
            f"restoring the random state of {len(cuda)} CUDA devices",
            f"{here} here",
            "the run would draw other numbers",
            "resume where there are as many devices",
        )
    random.setstate(words)
    np.random.set_state(legacy)
    torch.set_rng_state(host)
    for index, one in enumerate(cuda):
        torch.cuda.set_rng_state(one, index)


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
