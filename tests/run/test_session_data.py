"""Runs on conversations, on mixtures and with several validation sets: what they report, and that they resume."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from session_cases import WORDS, Heard, _own_cache, fingerprints, lines, make_texts, merged, write_texts  # noqa: F401

import skimp.api
from skimp.core.errors import DataError, RecipeError

pytestmark = pytest.mark.usefixtures("plan_once")


@pytest.fixture
def mixed(recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Two parts conversations, one part text; a set of each to validate on."""
    rng = random.Random(3)

    def words(few: int, many: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(few, many)))

    chats = [
        {
            "messages": [
                {"role": r, "content": words(2, 9)} for _ in range(rng.randint(1, 2)) for r in ("user", "assistant")
            ]
        }
        for _ in range(40)
    ]
    chats.insert(7, {"messages": [{"role": "user", "content": words(80, 90)}, {"role": "assistant", "content": "no"}]})
    for name, rows in (("chat", chats), ("chat-held", chats[:6])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "short.jinja").write_text(
        "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
    )
    write_texts(tmp_path / "text.jsonl", make_texts(20, 1))
    write_texts(tmp_path / "text-held.jsonl", make_texts(5, 2))
    return merged(
        recipe,
        {
            "data.train": [
                {"source": str(tmp_path / "chat.jsonl"), "weight": 2, "name": "chat"},
                {"source": str(tmp_path / "text.jsonl"), "weight": 1, "name": "text"},
            ],
            "data.template": str(tmp_path / "short.jinja"),  # chatml takes 20 of these tokens a turn
            "data.validation": {"chat": str(tmp_path / "chat-held.jsonl"), "text": str(tmp_path / "text-held.jsonl")},
            "eval.every": 2,
        },
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_of_chats_and_text_reports_and_resumes(
    mixed: dict[str, Any], tmp_path: Path, streaming: bool
) -> None:
    mixed = merged(mixed, {"data.streaming": streaming})
    voice = Heard()
    whole = skimp.api.train(merged(mixed, {"output": str(tmp_path / "whole")}), voice=voice)
    skimp.api.train(mixed, voice=Heard(stop_at=2))
    skimp.api.train(mixed, resume=True, voice=Heard(stop_at=3))
    parts = skimp.api.train(mixed, resume=True)
    assert fingerprints(whole.folder, 6) == fingerprints(parts.folder, 6)
    assert lines(whole.folder / "evals.jsonl") == lines(parts.folder / "evals.jsonl")
    assert [r["loss"] for r in lines(whole.folder / "metrics.jsonl")] == [
        r["loss"] for r in lines(parts.folder / "metrics.jsonl")
    ]
    for summary in (whole.summary, parts.summary):
        data = summary["data"]
        assert {n: s["rows"] for n, s in data["given"]["sources"].items()} == {"chat": 16, "text": 8}
        assert data["given"]["trained_tokens"] == sum(r["tokens"] for r in lines(whole.folder / "metrics.jsonl"))
        assert summary["eval_losses"].keys() == {"before", "after"}
        assert summary["eval_losses"]["after"].keys() == {"chat", "text"}
        assert summary["eval_loss_after"] == summary["eval_losses"]["after"]["chat"]
        if streaming:
            assert data["given"]["read"]["untrained_documents"] >= 1
        else:
            chat = data["trains"][0]["by_source"][0]
            assert (chat["format"], chat["untrained_documents"]) == ("messages", 1)
            assert chat["trained_tokens"] < chat["tokens"] / 1.5
    assert [row["step"] for row in lines(whole.folder / "evals.jsonl")] == [0, 2, 4, 6]
    assert all(row["eval_losses"].keys() == {"chat", "text"} for row in lines(whole.folder / "evals.jsonl"))
    said = "\n".join(voice.said)
    assert "held-out loss of chat" in said
    assert "rows of format messages" in said
    assert "mixture: 66.7% of the rows from chat, 16 in 6 steps" in said or streaming


def test_the_watched_set_decides(mixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([(1.0, 9.0), (2.0, 5.0), (3.0, 6.0), (4.0, 4.0), (5.0, 5.0)])
    names = ("chat", "text")
    monkeypatch.setattr(
        "skimp.run.session._Beside.evaluate", lambda self: dict(zip(names, next(losses, (9.0, 9.0)), strict=True))
    )
    run = merged(mixed, {"eval.watch": "text", "eval.keep_best": True, "checkpoint.every": 1})
    outcome = skimp.api.train(run)
    assert [(r["eval_loss"], r["best"]) for r in lines(outcome.folder / "evals.jsonl")] == [
        (9.0, False), (5.0, True), (6.0, False), (4.0, True),
    ]  # fmt: skip
    with pytest.raises(RecipeError, match=r"eval.watch(.|\n)*the sets are chat, text"):
        skimp.api.train(merged(mixed, {"eval.watch": "txet"}))


def test_a_mixture_may_end_with_its_shortest_source(mixed: dict[str, Any]) -> None:
    voice = Heard()
    stopping = {"data.when_out": "stop", "train.steps": 500, "eval": None, "data.validation": None}
    outcome = skimp.api.train(merged(mixed, stopping), voice=voice)
    assert outcome.stopped == "finished"
    given = outcome.summary["data"]["given"]["sources"]
    assert all(source["passes"] == 0 for source in given.values())
    assert any("of 500 steps, then a source runs out" in line for line in voice.said)


def test_nothing_left_is_told_before_a_model_is_built(
    mixed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skimp.run.session.build", lambda *_, **__: pytest.fail("a model was built"))
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "the cat " * 60, "completion": "sat"}) + "\n")
    with pytest.raises(
        DataError, match=r"the prompt fills the row(.|\n)*nothing is left to train on(.|\n)*data.seq_len="
    ):
        skimp.api.train(merged(mixed, {"data.train": str(tmp_path / "long.jsonl")}))
    with pytest.raises(DataError, match=r"0 rows of 32 tokens \(1 without a trained token within a row\)"):
        skimp.api.train(merged(mixed, {"data.train": str(tmp_path / "long.jsonl"), "data.streaming": True}))
