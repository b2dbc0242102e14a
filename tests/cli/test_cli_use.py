"""eval, generate, chat and export as they are typed: what they print, exit codes, and what they refuse."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(write_recipe: Callable[..., str], recipe: dict[str, Any], plan_once: None, skimp: Callable[..., Any]) -> str:
    assert skimp("train", write_recipe(), "--quiet").code == 0
    return str(recipe["output"])


def test_a_run_is_scored_continued_exported_and_used_again(run: str, skimp: Callable[..., Any], tmp_path: Path) -> None:
    scored = skimp("eval", run, "--json")
    facts = json.loads(scored.out)
    assert scored.code == 0
    assert facts["step"] == 6
    assert facts["sets"][0]["tokens"] > 0
    shown = skimp("eval", run, "--limit", "2", columns=160)
    assert "token accuracy" in shown.out
    assert "planned" in shown.out
    texts = [skimp("generate", run, "the cat", "--tokens", "6").out for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("the cat")
    done = skimp("export", run, "--to", "merged", "--json")
    assert done.code == 0, done.err
    merged = json.loads(done.out)["target"]
    assert merged == str(Path(run) / "export" / "merged")
    card = (Path(merged) / "README.md").read_text()
    assert all(part in card for part in ("Memory, planned and measured", "optimizer steps | 6", "batch_tokens: 128"))
    again = json.loads(skimp("eval", merged, "--data", facts_data(run), "--seq", "32", "--json").out)
    own = json.loads(skimp("eval", run, "--data", facts_data(run), "--json").out)
    assert again["sets"][0]["loss"] == pytest.approx(own["sets"][0]["loss"], rel=1e-6)
    refused = skimp("export", run, "--to", "merged")
    assert (refused.code, "--force replaces it" in refused.err) == (2, True)
    assert skimp("export", run, "--to", "merged", "--force", "--dtype", "bf16").code == 0
    file = str(tmp_path / "m.gguf")
    assert skimp("export", run, "--to", "gguf", "--output", file).code == 0
    assert skimp("generate", file, "the cat", "--tokens", "6").out == texts[0]


def facts_data(run: str) -> str:
    return str(json.loads((Path(run) / "recipe.json").read_text())["data"]["train"][0])


def test_prompts_of_a_pipe_and_of_a_file_and_json(
    tiny_folder: Path, skimp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nsat\n"))
    piped = json.loads(skimp("generate", model, "--tokens", "3", "--json").out)
    assert piped["prompt"] == "the cat\nsat"
    assert piped["tokens"] <= 3
    (tmp_path / "p.txt").write_text("the cat\n\non a mat\n")
    options = ("--temperature", "1.2", "--seed", "5", "--tokens", "4", "--json")
    lines = skimp("generate", model, "--lines", str(tmp_path / "p.txt"), *options).out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["the cat", "on a mat"]
    again = skimp("generate", model, "the cat", "on a mat", *options).out.splitlines()
    assert [json.loads(a)["text"] for a in lines] == [json.loads(b)["text"] for b in again]


def test_a_conversation_of_a_pipe(
    tiny_folder: Path, skimp: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}{% endif %}"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n/reset\nthe cat\n\non a mat\n/quit\nnever\n"))
    done = skimp("chat", str(folder), "--json", "--tokens", "4", "--temperature", "0")
    replies = [json.loads(line) for line in done.out.splitlines()]
    assert [r["prompt"] for r in replies] == ["the cat", "the cat", "on a mat"]
    assert replies[0]["text"] == replies[1]["text"]
    one = json.loads(skimp("chat", str(folder), "the cat", "--json", "--tokens", "4", "--temperature", "0").out)
    assert one["text"] == replies[0]["text"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval", "MODEL"), "--data FILE"),
        (("eval", "MODEL", "--data", "nowhere.jsonl"), "no such file"),
        (("eval", "MODEL", "--data", "pydoc", "--budget", "1MB"), "--budget"),
        (("eval", "MODEL", "--data", "pydoc", "--seq", "4096"), "128 positions"),
        (("generate", "MODEL", ""), "an empty one"),
        (("generate", "nowhere/at/all", "a"), "nowhere"),
        (("generate", "MODEL", "a", "--top-p", "0.5"), "at temperature 0"),
        (("generate", "MODEL", "a", "--checkpoint", "3"), "only a run has checkpoints"),
        (("chat", "MODEL", "a"), "no chat template"),
        (("export", "MODEL", "--to", "merge"), "did you mean 'merged'"),
        (("export", "MODEL", "--to", "gguf", "--shard-size", "1GB"), "--to merged"),
        (("export", "MODEL", "--to", "merged", "--pre", "x"), "--to gguf"),
        (("export", "MODEL", "--to", "merged", "--dtype", "int4"), "known: bf16, fp16, fp32"),
    ],
)
def test_bad_input_is_one_message_and_no_traceback(
    words: tuple[str, ...], said: str, tiny_folder: Path, skimp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = skimp(*(str(tiny_folder) if word == "MODEL" else word for word in words))
    assert done.code == (3 if "1MB" in words else 2), done.out
    assert said in done.err, done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []
