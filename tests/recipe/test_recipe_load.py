from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skimp.core.errors import RecipeError
from skimp.recipe import load_recipe
from skimp.recipe.document import parse_document
from skimp.recipe.load import override

GOOD = "model: smollm2-135m\ndata: {train: pydoc}\noutput: runs/q\n"


def write(folder: Path, text: str | bytes, name: str = "quick.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path | str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_a_file_and_its_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "train: {lr: 2e-5, steps: 100}\n")
    recipe = load_recipe(path, ["train.steps=20", "exact.recompute=[0,1]", "budget=2GB", "train.steps=30"])
    assert recipe.train.lr == 2e-5
    assert recipe.train.steps == 30  # the last one wins
    assert recipe.exact.recompute == (0, 1)
    assert recipe.budget.host == 2 * 10**9
    assert load_recipe(str(path)) == load_recipe(path)


def test_pyyaml_reads_2e_5_as_text_and_a_recipe_takes_it(tmp_path: Path) -> None:
    document = parse_document("a: 2e-5\nb: 1e3\n", "here")
    assert document.values == {"a": "2e-5", "b": "1e3"}  # why number() and whole() take text
    path = write(tmp_path, GOOD + "train: {lr: 2e-5, steps: 1e3, weight_decay: 1e-1}\n")
    train = load_recipe(path).train
    assert (train.lr, train.steps, train.weight_decay) == (2e-5, 1000, 0.1)
    assert isinstance(train.steps, int)


def test_byte_order_mark_is_not_a_key(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode())).output == "runs/q"


def test_overrides_open_one_word_sections(raw: dict[str, Any]) -> None:
    recipe = load_recipe(
        {**raw, "optimizer": "adamw8bit"},
        ["model.init=scratch", "optimizer.eps=1e-6", "sample.prompt='a: b'"],
    )
    assert (recipe.model.name, recipe.model.init) == ("smollm2-135m", "scratch")
    assert (recipe.optimizer.name, recipe.optimizer.eps) == ("adamw8bit", 1e-6)
    assert recipe.sample is not None
    assert recipe.sample.prompt == "a: b"


def test_overrides_build_what_is_not_there() -> None:
    values: dict[str, Any] = {"eval": None}
    assert override(values, " eval.early_stop.patience = 4") == ("eval.early_stop.patience", 4)
    assert values == {"eval": {"early_stop": {"patience": 4}}}
    assert override(values, "output=a=b") == ("output", "a=b")
    assert values["output"] == "a=b"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.steps", ["no key=value", "train.steps=20"]),
        ("=5", ["no key=value"]),
        ("train..steps=5", ["no key=value"]),
        ("train.steps=", ["no value", "write null"]),
        ("exact.recompute=[0,", ["override 'exact.recompute=[0,'", "YAML"]),
        ("eval={every: 2, every: 3}", ["the same key"]),
        ("output.folder=x", ["output is 'runs/quickstart'", "no key 'folder'"]),
        ("budget.host=1GB", ["budget is '2GB'", "budget={host: 1GB}"]),
    ],
)
def test_malformed_overrides(raw: dict[str, Any], text: str, said: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({**raw, "budget": "2GB"}, [text])
    for part in said:
        assert part in str(caught.value)


def test_syntax_errors_name_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "model: x\ndata: {train: pydoc\noutput: y\n")
    message = refusal(path)
    assert f"{path}, line 3" in message
    message = refusal(write(tmp_path, "model: x\nsample: {prompt: @x}\n"))
    assert "line 2" in message
    assert "quote" in message
    assert "could not determine a constructor" in refusal(write(tmp_path, "model: !!python/name:os.system\n"))
    assert "line 3" in refusal(write(tmp_path, "model: x\ndata:\n\ttrain: y\n"))


def test_duplicate_keys_name_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "train:\n  lr: 1e-5\n  steps: 5\n  lr: 2e-5\n")
    message = refusal(path)
    assert f"{path}, line 7: 'train.lr'" in message
    assert "the same key on line 5" in message
    assert "line 4: 'model'" in refusal(write(tmp_path, GOOD + "model: gpt2\n"))


def test_keys_that_are_not_text(tmp_path: Path) -> None:
    assert "line 4: a key" in refusal(write(tmp_path, GOOD + "1: x\n"))
    assert 'put it in quotes: "on"' in refusal(write(tmp_path, GOOD + "on: x\n"))
    assert "line 4: a key" in refusal(write(tmp_path, GOOD + "? [a, b]\n: x\n"))


def test_anchors_work_and_loops_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "model: &m smollm2-135m\ndata: {train: pydoc, field: *m}\noutput: o\n")
    assert load_recipe(path).data.field == "smollm2-135m"
    merged = write(tmp_path, GOOD + "train: &t {lr: 1e-4, steps: 3}\n")
    assert load_recipe(merged).train.steps == 3
    assert "an alias to a part it is inside of" in refusal(write(tmp_path, "model: &m {name: *m}\n"))


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    missing = refusal(tmp_path / "quik.yaml")
    assert "no such file" in missing
    assert "did you mean 'quick.yaml'?" in missing
    assert "no such folder" in refusal(tmp_path / "nowhere" / "quick.yaml")
    assert "a folder" in refusal(tmp_path)
    assert "an empty file" in refusal(write(tmp_path, "# nothing\n", "empty.yaml"))
    assert "a list at the top" in refusal(write(tmp_path, "- a\n", "list.yaml"))
    assert "0xff at offset 7 is not UTF-8" in refusal(write(tmp_path, b"model: \xff", "latin.yaml"))
    assert "month must be in" in refusal(write(tmp_path, "output: 2024-13-01\n", "date.yaml"))
