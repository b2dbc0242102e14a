"""`skimp methods`: filters that narrow, pages that tell all, refusals that name what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from skimp.core.registry import Conflict, Facts, methods
from skimp.core.source import docstring, line_of, source_file
from skimp.recipe import load_recipe

Skimp = Callable[..., Any]


@pytest.mark.parametrize("name", list(methods()))
@pytest.mark.parametrize("columns", [60, 120])
def test_every_method_has_its_page(skimp: Skimp, name: str, columns: int) -> None:
    facts = methods()[name]
    done = skimp("methods", name, columns=columns)
    assert done.code == 0
    assert done.out.startswith(name)
    shown = done.out.split()
    assert not set(facts.summary.split()[1:]) - set(shown)
    assert not set(docstring(facts.where).split()) - set(shown)
    assert "every other method" in done.out or "instead:" in done.out
    assert max(len(line) for line in done.out.splitlines() if not re.search("import|  # ", line)) <= columns


def test_the_lines_that_switch_a_method_on_are_a_recipe() -> None:
    base: dict[str, Any] = {"model": "smollm2-135m", "data": {"train": "pydoc", "seq_len": 4096}, "output": "runs/x"}
    switched = 0
    for name, facts in methods().items():
        if facts.kind == "adapter" or not facts.snippet:
            continue
        lines = yaml.safe_load(facts.snippet)
        merged = {**base, **{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in lines.items()}}
        if "weights" in lines.get("model", {}):
            merged["adapter"] = "lora"  # packed weights are frozen
        load_recipe(merged)
        switched += 1
        if facts.kind == "update rule":
            assert load_recipe(merged).optimizer.name == name
    assert switched >= 8


def test_filters_narrow_and_combine(skimp: Skimp) -> None:
    def names(*words: str) -> set[str]:
        done = skimp("methods", "--json", *words)
        assert done.code == 0, done.err
        return {m["name"] for m in json.loads(done.out)}

    everything = set(methods())
    assert names() == everything
    assert names("--kind", "update rule") == {n for n, f in methods().items() if f.kind == "update rule"}
    assert names("--stage", "fine-tuning") == {n for n, f in methods().items() if "fine-tuning" in f.stages}
    assert names("--exact") | names("--approximate") == everything
    assert not names("--exact") & names("--approximate")
    assert names("logits", "--exact") <= {n for n, f in methods().items() if f.exact}
    assert "chunked-cross-entropy" in names("logits CROSS")
    assert names("AdamW8bit") == {"adamw8bit"}  # a name, in any case: that one alone


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--attacks", "gradient"), "did you mean 'gradients'"),
        (("--kind", "rule"), "update rule"),
        (("--stage", "finetuning"), "did you mean 'fine-tuning'"),
        (("adamw8bits",), "did you mean 'adamw8bit'"),
        (("adamw8bit", "--exact"), "no method"),
    ],
)
def test_what_no_method_has_is_refused(skimp: Skimp, words: tuple[str, ...], said: str) -> None:
    done = skimp("methods", *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_conflicts_are_shown_from_both_sides(skimp: Skimp, monkeypatch: pytest.MonkeyPatch) -> None:
    where = "skimp.core.units:parse_bytes"
    conflict = {"two": Conflict("both own the gradient", "one after the other")}
    one = Facts("one", "step", "halves it", where, (), True, conflicts=conflict)
    two = Facts("two", "step", "thirds it", where, (), True)
    monkeypatch.setattr("skimp.core.registry._methods", {"one": one, "two": two})
    for name, other in (("one", "two"), ("two", "one")):
        out = skimp("methods", name).out
        assert f"{other}: both own the gradient" in out
        assert "instead: one after the other" in out


def test_a_source_file_is_read_and_not_imported() -> None:
    assert line_of("skimp.core.units:parse_bytes") > 10
    assert line_of("skimp.core.units:UNITS") is None
    assert "Bytes in and out" in docstring("skimp.core.units:parse_bytes")
    assert source_file("skimp.no_such_module:x") is None
    assert (docstring("skimp.no_such_module:x"), line_of("skimp.no_such_module:x")) == ("", None)
