"""Kept profiles: equal to simulated ones, keyed by all they depend on, never trusted when torn, bounded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_extend import CONFIGS, recipe

from skimp.core.exact import ExactChoices
from skimp.plan import stored
from skimp.plan.cost import Rates
from skimp.plan.profile import MemoryProfile
from skimp.plan.simulate import simulate

RATES = Rates(1e14, 1e12, "a card")
EXACT = ExactChoices(1, (0,))
OPTIONS: dict[str, Any] = {"target": "cuda", "steps": 1, "blocks": 2, "short": True, "evaluate": False}
CONFIG = CONFIGS["llama"]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ExactChoices]:
    """What was really simulated; an empty folder."""
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path))
    monkeypatch.delenv(stored.SWITCH, raising=False)
    calls: list[ExactChoices] = []

    def counted(recipe_: Any, exact: ExactChoices, config: dict[str, Any], **options: Any) -> MemoryProfile:
        calls.append(exact)
        return simulate(recipe_, exact, config, **options)

    monkeypatch.setattr(stored, "simulate", counted)
    return calls


def profile(*overrides: str, exact: ExactChoices = EXACT, rates: Rates = RATES, **options: Any) -> MemoryProfile:
    found: MemoryProfile = stored.simulated(recipe(*overrides), exact, CONFIG, rates=rates, **(OPTIONS | options))
    return found


def test_the_second_is_read_and_is_the_first(asked: list[ExactChoices]) -> None:
    first, second = profile(), profile()
    assert len(asked) == 1
    assert second == first == simulate(recipe(), EXACT, CONFIG, rates=RATES, **OPTIONS)
    assert second.shares == first.shares
    assert second.places == first.places


def test_what_only_says_where_things_go_is_no_other_run(asked: list[ExactChoices]) -> None:
    profile()
    profile("output=runs/another", "budget=3GB", "checkpoint.every=7")
    assert len(asked) == 1


CHANGES: dict[str, Callable[[], MemoryProfile]] = {
    "optimizer": lambda: profile("optimizer=adamw8bit"),
    "length": lambda: profile("data.seq_len=20"),
    "clipping": lambda: profile("train.clip=null"),
    "choices": lambda: profile(exact=ExactChoices(1)),
    "device": lambda: profile(rates=Rates(2e14, 1e12, "another card")),
    "blocks": lambda: profile(blocks=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_else_is_another_run(asked: list[ExactChoices], name: str) -> None:
    profile()
    CHANGES[name]()
    assert len(asked) == 2


def test_a_changed_source_file_or_version_is_another_run(
    asked: list[ExactChoices], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile()
    for change in ({"skimp": "another sum"}, {"torch": "9.9"}):
        made = stored._made_by() | change
        monkeypatch.setattr(stored, "_made_by", lambda made=made: made)
        profile()
    assert len(asked) == 3


def test_the_sum_of_the_source_is_of_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").write_text("a = 1\n")
    monkeypatch.setattr(stored.skimp, "__file__", str(tmp_path / "__init__.py"))
    first = stored._made_by.__wrapped__()
    (tmp_path / "__init__.py").write_text("a = 2\n")
    assert stored._made_by.__wrapped__()["skimp"] != first["skimp"]


def other_number(text: str) -> str:
    found = json.loads(text)
    found["profile"]["of"]["parameters"] += 1
    return json.dumps(found)


@pytest.mark.parametrize(
    "damage", [lambda text: "", lambda text: text[:-40], lambda text: "[1]", other_number], ids=str
)
def test_a_damaged_file_is_ignored_and_replaced(asked: list[ExactChoices], damage: Callable[[str], str]) -> None:
    first = profile()
    (file,) = stored.folder().iterdir()
    file.write_text(damage(file.read_text()))
    assert profile() == first
    assert profile() == first
    assert len(asked) == 2
    assert list(stored.folder().iterdir()) == [file]


def test_switched_off_nothing_is_read_or_written(asked: list[ExactChoices], monkeypatch: pytest.MonkeyPatch) -> None:
    with stored.unstored():
        profile()
        assert not stored.folder().exists()
    monkeypatch.setenv(stored.SWITCH, "0")
    profile()
    assert not stored.folder().exists()
    assert len(asked) == 2


def test_a_cpu_and_a_disk_measured_now_are_not_kept(asked: list[ExactChoices]) -> None:
    for _ in range(2):
        profile(target="cpu")
    assert len(asked) == 2
    assert not stored._may_be_kept(recipe(), ExactChoices(1, states="host"), OPTIONS)
    assert not stored._may_be_kept(recipe(), EXACT, OPTIONS | {"timeline": True})
    assert stored._may_be_kept(recipe(), EXACT, OPTIONS)


def test_the_folder_is_bounded_and_what_is_in_use_stays(
    asked: list[ExactChoices], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile()
    (first,) = stored.folder().iterdir()
    for index in range(6):
        old = stored.folder() / f"{index}.json"
        old.write_bytes(first.read_bytes())
        os.utime(old, (index, index))
    size = first.stat().st_size
    monkeypatch.setattr(stored, "MOST", 6 * size)
    profile()  # in use
    profile(exact=ExactChoices(1))
    left = {path.name for path in stored.folder().iterdir()}
    assert first.name in left
    assert "5.json" in left
    assert "0.json" not in left
    assert sum(path.stat().st_size for path in stored.folder().iterdir()) <= 6 * size


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    asked: list[ExactChoices], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "file"))
    assert profile() == profile()
    assert len(asked) == 2
