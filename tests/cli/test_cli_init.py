"""`skimp init`: what it asks, what it looks at, what it writes, and that what it wrote runs."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from skimp.cli import answers
from skimp.core.errors import SkimpError
from skimp.recipe import json_schema, load_recipe
from skimp.recipe.keys import keys
from skimp.recipe.written import scalar, written

Skimp = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the user stands, on a machine with 10 GB free."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answers, "room", lambda: 10 * 10**9)
    return tmp_path


def rows(path: Path, *fields: dict[str, Any], count: int = 30) -> str:
    path.write_text("".join(json.dumps(fields[n % len(fields)]) + "\n" for n in range(count)), encoding="utf-8")
    return path.name


def test_nothing_asked_gives_a_recipe_of_the_usual(skimp: Skimp, here: Path) -> None:
    done = skimp("init", "--yes")
    assert done.code == 0, done.err
    recipe = load_recipe("recipe.yaml")
    assert (recipe.model.name, recipe.data.train, recipe.budget.host) == ("smollm2-135m", ("pydoc",), 8 * 10**9)
    assert (recipe.output, recipe.train.epochs) == ("runs/recipe", 1)
    for command in ("skimp plan recipe.yaml", "skimp train recipe.yaml"):
        assert command in done.out


def test_every_key_is_explained_in_the_words_of_the_schema(skimp: Skimp, here: Path) -> None:
    assert skimp("init", "--yes", "--all").code == 0
    known = {key.path: key for key in keys(json_schema())}
    text = Path("recipe.yaml").read_text()
    path, comment, seen = [""], "", set()
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            comment += " " + bare[1:].strip()
        elif bare:
            depth = (len(line) - len(line.lstrip())) // 2
            path = [*path[:depth], bare.partition(":")[0]]
            key = ".".join(path)
            assert known[key].about in " ".join(comment.split()), key
            seen.add(key)
            comment = ""
        else:
            comment = ""
    assert {key.path for key in known.values() if "." not in key.path} <= seen
    assert load_recipe("recipe.yaml") == load_recipe(yaml.safe_load(text))


def test_the_data_decides_what_follows_from_it(skimp: Skimp, here: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows(here / "chat.jsonl", {"messages": chat})
    rows(here / "few.jsonl", {"text": "a"}, count=3)
    (here / "book.txt").write_text("word " * 2_000_000)
    for name, said in (("chat.jsonl", "conversations, 30 rows"), ("few.jsonl", "3 rows"), ("book.txt", "plain text")):
        file = f"{name}.yaml"
        done = skimp("init", file, "--yes", "--data", name)
        assert done.code == 0, done.err
        assert said in done.out
    assert load_recipe("chat.jsonl.yaml").data.validation == 0.05
    few, book = load_recipe("few.jsonl.yaml"), load_recipe("book.txt.yaml")
    assert (few.data.validation, few.eval, book.eval) == (None, None, None)
    assert book.train.steps == answers.STEPS
    assert "% of one pass" in Path("book.txt.yaml").read_text()
    assert answers.usual_data(here) == "chat.jsonl"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "smollm3-135m"), "did you mean"),
        (("--data", "none.jsonl"), "no such file"),
        (("--data", "empty.jsonl"), "empty file"),
        (("--data", "odd.jsonl"), "data.field=body"),
        (("--data", "pairs.jsonl"), "not trained on yet"),
        (("--data", "broken.jsonl"), "row 1"),
        (("--memory", "two"), "write it as 2GB"),
        (("--memory", "100MB"), "budget: 1GB or more"),
        (("train.stepss=3",), "did you mean 'steps'"),
    ],
)
def test_a_wrong_answer_is_refused_and_nothing_is_written(
    skimp: Skimp, here: Path, flags: tuple[str, ...], said: str
) -> None:
    rows(here / "odd.jsonl", {"body": "text"})
    rows(here / "pairs.jsonl", {"chosen": "a", "rejected": "b"})
    (here / "empty.jsonl").write_text("")
    (here / "broken.jsonl").write_text("{\n")
    done = skimp("init", "r.yaml", "--yes", *(() if "--data" in flags else ("--data", "pydoc")), *flags)
    assert done.code == 2
    assert said in done.err
    assert not Path("r.yaml").exists()


def test_a_field_of_another_name_is_said_beside_the_file(skimp: Skimp, here: Path) -> None:
    rows(here / "odd.jsonl", {"body": "text"})
    rows(here / "pairs.jsonl", {"question": "a", "answer": "b"})
    assert skimp("init", "a.yaml", "data.field=body", "--yes", "--data", "odd.jsonl").code == 0
    assert load_recipe("a.yaml").data.field == "body"
    found = answers.data("pairs.jsonl data.fields.prompt=question data.fields.completion=answer")
    assert "prompts with completions" in found.said
    assert found.values["data.train"] == "pairs.jsonl"
    assert found.values["data.fields.prompt"] == "question"


def test_nothing_is_overwritten_and_no_folder_is_taken_twice(skimp: Skimp, here: Path) -> None:
    Path("recipe.yaml").write_text("mine")
    Path("recipe-2.yaml").write_text("mine too")
    done = skimp("init", "--yes")
    assert (done.code, Path("recipe.yaml").read_text()) == (2, "mine")
    assert "skimp init recipe-3.yaml" in done.err
    Path("runs/other").mkdir(parents=True)
    assert skimp("init", "other.yaml", "--yes").code == 0
    assert load_recipe("other.yaml").output == "runs/other-2"
    assert "mkdir -p" in skimp("init", "no/where.yaml", "--yes").err
    assert "skimp init recipe.yaml train.lr=1" in skimp("init", "train.lr=1", "--yes").err


def test_without_a_terminal_it_says_what_to_give(skimp: Skimp, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        done = skimp("init")
    assert done.code == 2
    assert "--yes" in done.err


def test_a_model_without_weights_starts_from_scratch(skimp: Skimp, here: Path) -> None:
    done = skimp("init", "--yes", "--model", "galore-llama-60m")
    assert done.code in (0, 2)
    if done.code == 0:
        assert load_recipe("recipe.yaml").model.init == "scratch"
    else:
        assert "tokenizer" in done.err


def test_more_than_is_free_is_said(here: Path) -> None:
    assert "10.0 GB are free now" in answers.memory("80GB").said
    assert answers.memory("2GB").notes["budget"].startswith("10.0 GB were free")
    assert answers.usual_memory() == "8GB"


def test_values_as_yaml_and_an_unknown_key() -> None:
    assert [scalar(v) for v in (None, True, 1, 0.5, "a: b", [0.9, 0.95], ["x"], "2GB")] == [
        "null", "true", "1", "0.5", "'a: b'", "[0.9, 0.95]", "[x]", "2GB",
    ]  # fmt: skip
    with pytest.raises(SkimpError, match=r"train\.no"):
        written({"train": {"no": 1}})


def answer_on_a_terminal(folder: Path, words: list[str], lines: list[str]) -> str:
    """Run `skimp` on a terminal of its own, type a line at every question, return the screen."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "skimp.cli.main", *words], stdin=follower, stdout=follower, stderr=follower, cwd=folder,
        env={**os.environ, "COLUMNS": "100", "TERM": "dumb", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(follower)
    seen, end, waiting = "", time.monotonic() + 120, list(lines)
    while time.monotonic() < end and (select.select([leader], [], [], 0.5)[0] or process.poll() is None):
        try:
            seen += os.read(leader, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            break
        if waiting and seen.rstrip().endswith(":"):
            os.write(leader, waiting.pop(0).encode() + b"\n")
            seen += "⏎"
    os.close(leader)
    assert process.wait(60) == 0, seen
    return seen


@pytest.mark.slow
def test_three_questions_a_wrong_answer_and_a_plan(tmp_path: Path, tiny_folder: Path, text_file: Path) -> None:
    """What a newcomer does: mistypes the data, is told, answers again, and sees the plan."""
    lines = [str(tiny_folder), "no-such.jsonl", str(text_file), "2GB", "y"]
    seen = answer_on_a_terminal(tmp_path, ["init", "mine.yaml"], lines)
    for part in (
        "Which model?",
        "Which data?",
        "no such file",
        "rows of text",
        "How much memory",
        "Plan it now?",
        "fits",
    ):
        assert part in seen, part
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert (recipe.data.seq_len, recipe.train.batch_tokens) == (128, 512)


@pytest.mark.slow
def test_what_it_writes_runs_as_it_stands(
    skimp: Skimp, tmp_path: Path, tiny_folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--model", str(tiny_folder), "--data", str(text_file), "--memory", "2GB", "--yes"]
    assert skimp("init", "r.yaml", *flags).code == 0
    done = skimp("train", "r.yaml", "--quiet")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["stopped"] == "finished"


def test_an_override_is_an_answer_before_what_follows_is_settled(tmp_path: Path) -> None:
    """A validation set named for a small file is evaluated on; steps that were asked for replace the one pass."""
    from skimp.cli.init import START, recipe_text

    rows = tmp_path / "small.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(3)), encoding="utf-8")
    held = tmp_path / "val.jsonl"
    held.write_text(rows.read_text(encoding="utf-8"), encoding="utf-8")
    words = [f"data.validation={held}", "train.steps=50"]
    answer = answers.data(str(rows), words[:1])
    values = {**START, "model": "smollm2-135m", "budget": "2GB", **answer.values}
    written = yaml.safe_load(recipe_text(tmp_path / "r.yaml", values, answer.notes, words, False))
    assert written["data"]["validation"] == str(held)
    assert written["eval"]["at_end"] is True
    assert written["train"]["steps"] == 50
    assert "epochs" not in written["train"]


def test_words_about_data_may_hold_blanks_and_other_json_is_no_data(tmp_path: Path) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text(json.dumps({"q": "one", "a": "two"}) + "\n", encoding="utf-8")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    found = answers.data(str(rows), ["data.fields={prompt: q, completion: a}"])
    assert found.said.startswith("prompts with completions")
    assert found.values["data.fields"] == {"prompt": "q", "completion": "a"}
    assert answers.usual_data(tmp_path) == "pairs.jsonl"
