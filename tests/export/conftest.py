"""The tiny model and recipe of the session tests, for exports and for whatever uses a model."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))

from session_cases import _own_cache, plan_once, recipe, shared_cache, text_file, tiny_folder  # noqa: F401
