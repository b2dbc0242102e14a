"""What a shell offers after TAB, in this process and in the shells themselves; and that it never waits for torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skimp.cli import complete
from skimp.cli.completion import SCRIPTS
from skimp.recipe import json_schema, load_recipe
from skimp.recipe.keys import keys
from skimp.recipe.problem import RecipeErrors

Skimp = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes, texts and two runs, in which the user stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / ".cache"))
    for name in ("one.yaml", "two.yml", "notes.md", "texts/a.jsonl", "texts/b.csv", "texts/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    for name in ("runs/a", "runs/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    return tmp_path


def words(offers: Any) -> list[str]:
    return [word for word, _ in offers]


def test_recipes_runs_and_the_way_to_them(here: Path) -> None:
    assert words(complete.recipes("")) == ["one.yaml", "runs/", "texts/", "two.yml", "runs/a", "runs/b"]
    assert words(complete.recipes("o")) == ["one.yaml"]
    assert words(complete.recipes("./o")) == ["./one.yaml"]
    assert words(complete.recipes("runs/")) == ["runs/a", "runs/b"]
    assert words(complete.run_folders("runs/b")) == ["runs/b"]
    assert words(complete.opened("runs/a"))[0] == "runs/a"
    assert words(complete.recipes(f"{here}/tw")) == [f"{here}/two.yml"]
    assert words(complete.recipes("absent/x")) == []


def test_keys_section_by_section_then_values(here: Path) -> None:
    assert words(complete.overrides("tr")) == ["train."]
    assert {"train.steps=", "train.schedule=", "train.loss."} <= set(words(complete.overrides("train.")))
    schedules = words(complete.overrides("train.schedule="))
    assert schedules == [f"train.schedule={name}" for name in ("cosine", "linear", "constant", "wsd")]
    assert words(complete.overrides("data.packing=")) == ["data.packing=true", "data.packing=false"]
    assert "optimizer=adamw8bit" in words(complete.overrides("optimizer=ad"))
    assert "model=smollm2-135m" in words(complete.overrides("model=smol"))
    assert words(complete.overrides("data.train=texts/")) == ["data.train=texts/a.jsonl", "data.train=texts/b.csv"]
    assert words(complete.overrides("no.such=")) == []
    assert words(complete.recipe_or_override("tr")) == ["train."]
    assert "rtx-4090" in words(complete.cards("rtx-40"))
    assert "smollm2-135m" in words(complete.opened("smol"))
    assert words(complete.precisions("bf")) == ["bf16-mixed", "bf16"]
    assert "activations" in words(complete.attacked("act"))
    assert words(complete.kinds("up")) == ["update rule"]
    assert "adamw8bit" in words(complete.method_names("adamw8"))


def test_every_choice_of_every_key_is_taken_by_the_recipe() -> None:
    """Some ask for another key beside them; none is refused for what it is."""
    base = {"model": "smollm2-135m", "data": {"train": "pydoc"}, "output": "runs/x"}
    tried, refused = 0, []
    for key in keys(json_schema()):
        for choice in key.choices:
            tried += 1
            try:
                load_recipe(base, [f"{key.path}={choice}"])
            except RecipeErrors as error:
                refused += [(p.key, choice, p.expected) for p in error.problems]
    assert tried > 30
    assert not [r for r in refused if re.match("one of|true or false|a |text", r[2])], refused


def test_the_keys_are_kept_until_the_schema_changes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = complete.recipe_keys()
    assert fresh == keys(json_schema())
    with monkeypatch.context() as patch:
        patch.setattr("skimp.recipe.keys.keys", lambda _: 1 / 0)
        assert complete.recipe_keys() == fresh
        patch.setattr(complete, "_stamp", lambda: [["schema.py", 1, 2]])
        with pytest.raises(ZeroDivisionError):
            complete.recipe_keys()
    (here / ".cache/completion.json").write_text("{")
    assert complete.recipe_keys() == fresh
    monkeypatch.setenv("SKIMP_CACHE", str(here / "one.yaml" / "no"))
    assert complete.recipe_keys() == fresh


def test_an_offer_is_one_short_line(here: Path) -> None:
    for about in ("", "train.", "data.", "exact.", "optimizer="):
        for _, text in complete.overrides(about):
            assert len(text) <= complete.LONGEST
            assert "\n" not in text


def test_the_scripts_are_printed_and_an_unknown_shell_is_refused(skimp: Skimp) -> None:
    for shell, script in SCRIPTS.items():
        assert skimp("completion", shell).out == script
    done = skimp("completion", "bsh")
    assert done.code == 2
    assert "did you mean 'bash'" in done.err
    assert "--install-completion" not in skimp("--help").out


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """With a `skimp` of this interpreter first on the path."""
    command = tmp_path / "bin" / "skimp"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m skimp.cli.main "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), **more}


BASH = """
source <(skimp completion bash)
compopt() { echo "$2"; }
try() { COMP_LINE="$1"; COMP_POINT=${#1}; _skimp_complete skimp; printf '%s ' "${COMPREPLY[@]}"; echo; }
try "skimp tr"
try "skimp train one.yaml train.sch"
try "skimp train one.yaml train.schedule=co"
try "skimp train runs/"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_in_bash(here: Path) -> None:
    """Bash cuts words at `=`: after `train.schedule=co` it wants `cosine`, not the whole word again."""
    done = subprocess.run(
        ["bash", "-c", BASH], capture_output=True, text=True, env=environment(here), cwd=here, check=True, timeout=60
    )
    assert done.stdout.split("\n") == [
        "train ",
        "nospace",
        "train.schedule= ",
        "cosine constant ",
        "runs/a runs/b ",
        "",
    ]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_in_fish(here: Path) -> None:
    script = 'skimp completion fish | source; complete -C "skimp train one.yaml train.schedule=c"'
    done = subprocess.run(
        ["fish", "-c", script], capture_output=True, text=True, env=environment(here, HOME=str(here)), cwd=here,
        check=True, timeout=60,
    )  # fmt: skip
    assert sorted(done.stdout.split()) == ["train.schedule=constant", "train.schedule=cosine"]


IMPORTED = """
import json, runpy, sys
sys.argv = ["skimp", *sys.argv[1:]]
try:
    runpy.run_module("skimp.cli.main", run_name="__main__")
finally:
    print("IMPORTED", json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("typed", [None, "skimp train one.yaml optimizer=", "skimp ", "skimp plan --gpu "])
def test_neither_help_nor_completion_imports_torch(here: Path, typed: str | None) -> None:
    asked = {
        "_SKIMP_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": typed,
    }
    env = environment(here, **({} if typed is None else asked))
    arguments = ["--help"] if typed is None else []
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True, env=env, cwd=here, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = set(json.loads(done.stdout.split("IMPORTED ")[1]))
    assert not imported & {"torch", "numpy", "transformers", "pyarrow"}
    if typed is not None:
        assert len(done.stdout.splitlines()) > 3
