from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from skimp.core.errors import RecipeError
from skimp.recipe import Recipe, json_schema, load_recipe
from skimp.recipe.explain import _all_keys, _section_of


def test_the_recipe_of_the_design_reads_as_it_stands() -> None:
    raw = {
        "model": "smollm2-135m",
        "precision": "fp32",
        "data": {"train": "pydoc", "seq_len": 512, "packing": True},
        "budget": "2GB",
        "train": {
            "steps": 20, "batch_tokens": 2048, "lr": "2e-5", "schedule": "cosine", "warmup": 2, "clip": 1.0,
        },
        "optimizer": {"name": "adamw8bit"},
        "output": "runs/quickstart",
    }  # fmt: skip
    recipe = load_recipe(raw)
    assert recipe.model.name == "smollm2-135m"
    assert recipe.data.train == ("pydoc",)
    assert recipe.budget.host == 2 * 10**9
    assert recipe.budget.device is None
    assert recipe.train.lr == 2e-5
    assert recipe.train.warmup == 2
    assert isinstance(recipe.train.warmup, int)
    assert recipe.train.epochs is None
    assert recipe.rows_per_step == 4
    assert raw["budget"] == "2GB"  # the caller's dict is not written to
    assert raw["model"] == "smollm2-135m"


def test_only_model_text_and_output_are_needed(raw: dict[str, Any]) -> None:
    recipe = load_recipe(raw)
    assert recipe.train.epochs == 1.0
    assert recipe.train.batch_tokens == 4 * 512
    assert recipe.optimizer.name == "adamw"
    assert recipe.budget.host is None
    assert recipe.eval is not None
    assert recipe.sample is None
    for key in ("model", "data", "output"):
        with pytest.raises(RecipeError, match=f"{key}.*needed, and has no default"):
            load_recipe({k: v for k, v in raw.items() if k != key})


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"train": {"steps": 7, "schedule": "wsd", "warmup": 0.1}},
        {"budget": {"device": "24GB", "host": "64GB", "disk": "0.5TB"}, "device": "cuda"},
        {"budget": None},
        {"budget": "8GB", "device": "RTX-4090"},
        {
            "data": {
                "train": ["a.jsonl", "b.txt"],
                "validation": "held.jsonl",
                "seq_len": 128,
                "encoding": "latin-1",
            }
        },
        {"data": {"train": "pydoc", "validation": None}},
        {"eval": None, "sample": {"prompt": "Once: upon\n", "tokens": 3}},
        {"eval": {"every": 5, "keep_best": True, "early_stop": {"patience": 2, "min_delta": 1e-3}}},
        {"exact": {"micro_batch": 1, "recompute": [3, 1, 1], "loss_chunk": 64, "in_backward": True}},
        {"exact": {"recompute": "none"}},
        {"exact": {"recompute": 5}},
        {"model": {"name": "gpt2", "init": "scratch", "seed": 3, "positions": "extend"}},
        {"optimizer": {"name": "adamw8bit", "betas": [0.8, "9e-1"], "eps": "1e-6"}},
    ],
)
def test_dump_and_load_are_inverses(raw: dict[str, Any], more: dict[str, Any]) -> None:
    recipe = load_recipe({**raw, **more})
    dumped = recipe.as_dict()
    assert load_recipe(dumped) == recipe
    assert load_recipe(json.loads(json.dumps(dumped))) == recipe
    assert load_recipe(dumped).as_dict() == dumped


def test_derived_defaults(raw: dict[str, Any]) -> None:
    assert load_recipe(raw, ["data.seq_len=100"]).train.batch_tokens == 400
    assert load_recipe(raw, ["train.steps=9"]).train.epochs is None
    assert load_recipe(raw, ["train.schedule=wsd"]).train.decay == 0.2
    assert load_recipe(raw, ["data.validation=null"]).eval is None
    assert load_recipe(raw, ["budget=1GiB"]).budget.host == 2**30
    on_card = load_recipe(raw, ["budget=24GB", "device=24GB"])
    assert (on_card.budget.device, on_card.budget.host) == (24 * 10**9, None)
    assert load_recipe(raw, ["device=CPU"]).device == "cpu"


def test_recompute_takes_four_forms(raw: dict[str, Any]) -> None:
    for written, read in (("null", None), ("none", "none"), ("all", "all"), ("4", 4), ("[2, 0, 2]", (0, 2))):
        assert load_recipe(raw, [f"exact.recompute={written}"]).exact.recompute == read


def test_warmup_is_steps_or_a_fraction(raw: dict[str, Any]) -> None:
    for written, read in (("0", 0), ("0.1", 0.1), ("1", 1), ("2.0", 2), ("1e2", 100)):
        value = load_recipe(raw, [f"train.warmup={written}"]).train.warmup
        assert value == read
        assert isinstance(value, type(read))


def test_a_recipe_is_frozen(raw: dict[str, Any]) -> None:
    recipe = load_recipe(raw)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.lr = 1.0  # type: ignore[misc]


def _sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    below = [_section_of(f.annotation) for f in section.model_fields.values()]
    return [section, *(s for b in below if b is not None for s in _sections(b))]


def test_every_key_is_documented_once_and_not_as_its_neighbour() -> None:
    texts = [f.description for s in _sections(Recipe) for f in s.model_fields.values()]
    assert all(t and t.endswith(".") and len(t) > 15 for t in texts)
    assert len(set(texts)) == len(texts)
    assert len(_all_keys(Recipe)) == len(texts)


def test_json_schema_knows_every_key_and_the_short_forms() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["required"] == ["model", "data", "output"]
    assert schema["additionalProperties"] is False
    for name in ("Model", "Optimizer"):
        assert schema["$defs"][name]["anyOf"][0] == {"type": "string"}
    assert schema["$defs"]["Budget"]["anyOf"][0] == {"type": ["string", "integer"]}
    assert schema["$defs"]["Train"]["properties"]["schedule"]["enum"] == [
        "cosine",
        "linear",
        "constant",
        "wsd",
    ]


def test_reading_a_recipe_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from skimp.recipe import *;"
        "r = load_recipe({'model': 'smollm2-135m', 'data': {'train': 'pydoc'}, 'output': 'o'});"
        "resolve_model(r.model); json_schema(); resolve_gpu('24GB'); host_budget();"
        "heavy = {'torch', 'transformers', 'gguf', 'huggingface_hub', 'datasets'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("real_rules")
def test_the_default_update_rule_exists(raw: dict[str, Any]) -> None:
    assert load_recipe(raw).optimizer.name == "adamw"
    assert load_recipe({**raw, "optimizer": "adamw8bit"}).optimizer.betas == (0.9, 0.999)


def test_keys_of_a_rule_are_filled_from_the_rule_and_dropped_with_it(raw: dict[str, Any], real_rules: None) -> None:
    optimizer = load_recipe(raw, ["optimizer={name: adamw8bit, eps: 1e-6}"]).optimizer
    assert optimizer.options() == {"betas": (0.9, 0.999), "eps": 1e-6}
    assert optimizer.renamed("adamw").options() == {"betas": (0.9, 0.999), "eps": 1e-6}
