"""Text to ids and back, as a program: `python -m skimp.data.text TOKENIZER`, JSON request in, JSON out.

The training process asks this child for a prompt's ids and for generated text: it never loads a tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from skimp.core.errors import SkimpError


def answer(location: str, request: dict[str, Any]) -> dict[str, Any]:
    """One request.

    Args:
        location: a model folder, tokenizer.json or GGUF file.
        request: `{"encode": text}` or `{"decode": [[ids], …]}`.

    Returns:
        `{"ids": […], "end": id, "size": largest id + 1}`, or `{"texts": […]}`.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    from skimp.data.fingerprint import cache_folder, tokenizer_fingerprint
    from skimp.data.tokenizer import load_tokenizer

    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / "tokenizers" / tokenizer_fingerprint(location, cache)
    ready = os.path.isfile(location) and location.endswith(".json")
    ready = ready or os.path.isfile(os.path.join(location, "tokenizer.json"))
    loaded = load_tokenizer(location, None, None if ready else Path(kept))
    if "decode" in request:
        return {"texts": [loaded.encode.decode(ids, skip_special_tokens=True) for ids in request["decode"]]}
    ids = loaded.encode.encode(request["encode"], add_special_tokens=True).ids
    return {"ids": ids, "end": loaded.end, "size": loaded.size}


def main() -> int:
    """Read the request from standard input, print the answer, or `{"error": {asked, found, …}}`."""
    request = json.load(sys.stdin)
    # Libraries print; what they print must not mix with the answer. Keep the real output, point 1 at 2.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        result = answer(sys.argv[1], request)
    except SkimpError as error:
        parts = {"asked": error.asked, "found": error.found, "why": error.why, "instead": error.instead}
        result = {"error": parts}
    with out:
        json.dump(result, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
