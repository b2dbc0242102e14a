"""`skimp schema`: the JSON schema of a recipe, for editors."""

from __future__ import annotations

import json


def command() -> None:
    """Print the JSON schema of a recipe file."""
    from skimp.recipe import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
