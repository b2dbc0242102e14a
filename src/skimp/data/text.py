"""Text to ids and back, as a program: `python -m skimp.data.text TOKENIZER`, a JSON request in, a JSON answer out.

The training process asks this child for a prompt's ids and for generated text, so that it never loads a tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from skimp.core.errors import SkimpError


def answer(location: str, request: dict[str, Any]) -> dict[str, Any]:
    """`{"encode": text}` -> `{"ids": […], "end": id}`; `{"decode": [[ids], …]}` -> `{"texts": […]}`."""
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
    return {"ids": ids, "end": loaded.end}


def main() -> int:
    """Read the request from standard input, print the answer; an error goes to standard error with status 2."""
    try:
        print(json.dumps(answer(sys.argv[1], json.load(sys.stdin))))
    except SkimpError as error:
        print(error.message().replace("\n", "; "), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
