"""The tiny model and recipe of the session tests, and the command line called in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from skimp.core import lean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))

from session_cases import _own_cache, plan_once, recipe, shared_cache, text_file, tiny_folder  # noqa: F401


class Done(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def skimp(capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """`skimp("train", "r.yaml")`: the real entry point with `sys.argv`, in this process for speed.

    An exception that is no error of the user's leaves `main`, so it fails the test: it would be a traceback.
    """
    from skimp.cli.main import main

    def run(*words: str, columns: int = 80) -> Done:
        monkeypatch.setattr(sys, "argv", ["skimp", *words])
        monkeypatch.setenv("COLUMNS", str(columns))
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            lean.withdraw()  # the command line keeps its stand-ins; this process is pytest's
        code = ended.value.code
        out, err = capfd.readouterr()
        return Done(0 if code is None else int(code), out, err)

    return run


@pytest.fixture
def write_recipe(tmp_path: Path, recipe: dict[str, Any]) -> Callable[..., str]:  # noqa: F811
    """The session tests' recipe as a file, with dotted keys changed."""
    from session_cases import merged

    def write(changes: dict[str, Any] | None = None, name: str = "r.yaml") -> str:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(merged(recipe, changes or {})), encoding="utf-8")
        return str(path)

    return write
