"""Every bad input of the command line: a message naming file, key, row or module; its code; nothing lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard

from skimp.core.errors import SkimpError

Skimp = Callable[..., Any]


def refused(done: Any, *parts: str, code: int = 2) -> None:
    """The message is on standard error, names every part, and is no traceback."""
    assert done.code == code, done
    assert done.err.startswith("skimp: "), done.err
    assert "Traceback" not in done.err + done.out
    for part in parts:
        assert part in done.err, f"'{part}' is not in:\n{done.err}"


# (what is changed in the recipe, what the message must name)
RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "misspelt key": ({"train.stpes": 3}, ("train.stpes", "did you mean", "steps", "r.yaml, line")),
    "misspelt section": ({"trian": {}}, ("trian", "did you mean", "train")),
    "wrong type": ({"train.steps": "many"}, ("train.steps", "'many'")),
    "wrong type of a section": ({"train": 3}, ("train", "3")),
    "out of range": ({"train.lr": -1}, ("train.lr", "-1")),
    "unknown optimizer": ({"optimizer": "adamw8bits"}, ("optimizer", "adamw8bits", "adamw8bit")),
    "unknown logger": ({"log": "tensorbord"}, ("log", "'tensorbord'", "did you mean 'tensorboard'", "r.yaml, line")),
    "unknown logger among others": ({"log": ["wandb", "mlflow"]}, ("log", "'mlflow'", "known: tensorboard")),
    "unknown option of a logger": ({"log": {"wandb": {"moed": 1}}}, ("log.wandb.moed", "did you mean 'mode'")),
    "unknown preset": ({"model": "smollm2-153m"}, ("smollm2-153m", "smollm2-135m")),
    "missing model folder": ({"model": "/nowhere/at/all"}, ("/nowhere/at/all",)),
    "unknown device": ({"device": "tpu"}, ("device", "tpu")),
    "unknown card": ({"device": "rtx-9999"}, ("device", "rtx-9999")),
    "a card cannot train": ({"device": "cuda"}, ("cuda", "device=cpu", "skimp plan")),
    "sequence beyond the positions": (
        {"data.seq_len": 256, "train.batch_tokens": 1024},
        ("data.seq_len 256", "128 positions", "data.seq_len=128"),
    ),
    "batch no multiple of rows": (
        {"train.batch_tokens": 100},
        ("train.batch_tokens", "multiple of data.seq_len"),
    ),
    "no such block": ({"exact.recompute": 9}, ("exact.recompute 9", "2 blocks")),
    "in backward with accumulation": (
        {"exact": {"in_backward": True, "micro_batch": 1}},
        ("exact.in_backward=true", "exact.micro_batch=4"),
    ),
    "missing data": ({"data.train": "texts/absent.jsonl"}, ("data.train", "texts/absent.jsonl")),
    "epochs of a stream": (
        {
            "data.streaming": True,
            "data.validation": None,
            "eval": None,
            "train.steps": None,
            "train.epochs": 1,
        },
        ("train.epochs", "train.steps"),
    ),
    "a sample beyond the positions": (
        {"sample": {"prompt": "the cat", "tokens": 500}},
        ("sample", "128 positions", "sample.tokens="),
    ),
    "validation tokens of nothing": (
        {"data.validation": None, "data.validation_tokens": 10, "eval": None},
        ("data.validation_tokens=10", "data.validation=null"),
    ),
    "steps and epochs": ({"train.epochs": 2}, ("train.steps", "train.epochs")),
    "pretrained without weights": ({"model": "galore-llama-60m"}, ("galore-llama-60m", "model.init=scratch")),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_bad_recipe(case: str, skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any]) -> None:
    changes, parts = RECIPES[case]
    refused(skimp("train", write_recipe(changes)), *parts)
    assert not Path(recipe["output"]).exists()


#: (file name, content, changes to the recipe, what the message must name)
TEXTS: dict[str, tuple[str, bytes, dict[str, Any], tuple[str, ...]]] = {
    "empty file": ("t.jsonl", b"", {}, ("t.jsonl", "empty")),
    "blank texts": ("t.jsonl", b'{"text": ""}\n{"text": "  "}\n', {}, ("t.jsonl", "nothing is left")),
    "malformed row": ("t.jsonl", b'{"text": "the cat"}\n{"text": "the \n', {}, ("t.jsonl, row 2",)),
    "text is a number": ("t.jsonl", b'{"text": "the cat"}\n{"text": 3}\n', {}, ("t.jsonl, row 2", "text")),
    "field missing": ("t.jsonl", b'{"txt": "the cat"}\n', {}, ("t.jsonl, row 1", "text", "txt")),
    "not UTF-8": (
        "t.jsonl",
        b'{"text": "the cat"}\n{"text": "caf\xe9"}\n',
        {},
        ("t.jsonl, row 2", "utf-8"),
    ),
    "not UTF-8 text file": ("t.txt", b"the cat\n\nsat \xff\xfe on\n", {}, ("t.txt", "utf-8")),
    "damaged parquet": ("t.parquet", b"PAR1 nonsense", {}, ("t.parquet",)),
    "unknown kind": ("t.docx", b"words", {}, ("t.docx", ".jsonl")),
    "row longer than allowed": (
        "t.jsonl",
        b'{"text": "the cat"}\n{"text": "' + b"the cat sat on a mat " * 20 + b'"}\n',
        {"data.too_long": "error"},
        ("t.jsonl, row 2", "seq_len = 32", "data.too_long=split"),
    ),
    "no chat template": (
        "t.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        {},
        ("t.jsonl, row 1", "has none", "data.template=FILE", "data.template=chatml"),
    ),
    "roles out of order": (
        "t.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}\n',
        {"data.template": "chatml"},
        ("t.jsonl, row 1, turn 2", "after user comes assistant", "data.bad_rows=drop"),
    ),
    "prompts as long as a row": (
        "t.jsonl",
        b'{"prompt": "' + b"the cat sat on a mat " * 20 + b'", "completion": "and"}\n',
        {},
        ("the prompt fills the row", "nothing is left to train on", "data.seq_len="),
    ),
    "ragged csv": ("t.csv", b"prompt,completion\na,b\na,b,c\n", {}, ("t.csv, row 2 (line 3)", "3 cells")),
    "preference pairs": (
        "t.jsonl",
        b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
        {},
        ("preference pairs", "1 pairs, read and checked", "data.fields.completion=chosen"),
    ),
    "missing validation set": (
        "t.jsonl",
        b'{"text": "the cat sat on a mat"}\n',
        {"data.validation": {"held": "/dev/null/none.jsonl"}},
        ("data.validation.held", "/dev/null/none.jsonl"),
    ),
    "format of no such field": (
        "t.jsonl",
        b'{"text": "the cat"}\n',
        {"data.format": "messages"},
        ("data.format=messages", "fields there: text", "data.fields.messages=NAME"),
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_bad_text(
    case: str, skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any], tmp_path: Path
) -> None:
    name, content, changes, parts = TEXTS[case]
    (tmp_path / name).write_bytes(content)
    whole = {"data.validation": None, "eval": None, "data.train": str(tmp_path / name), **changes}
    refused(skimp("train", write_recipe(whole)), *parts)
    assert not Path(recipe["output"]).exists()


@pytest.mark.usefixtures("plan_once")
def test_rows_longer_than_seq_len_are_counted_with_the_rule(skimp: Skimp, write_recipe: Callable[..., str]) -> None:
    done = skimp("train", write_recipe({"data.too_long": "truncate", "train.steps": 1}))
    assert done.code == 0
    assert "documents over 32 tokens truncated to 32 tokens" in done.out
    assert "documents truncated, " in done.out


# --------------------------------------------------------------------------------------- model folders
def damaged(tiny_folder: Path, folder: Path, what: str) -> None:
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    if what == "unknown architecture":
        config |= {"model_type": "llamma", "architectures": ["LlammaForCausalLM"]}
    elif what == "vocabulary":
        config["vocab_size"] = 280
    elif what == "weights of other shape":
        config["intermediate_size"] = 96
    elif what == "weights missing":
        (folder / "model.safetensors").unlink()
    elif what == "weights cut":
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(100_000)
    elif what == "weights of a smaller model":
        config["num_hidden_layers"] = 3
    elif what == "no config":
        (folder / "config.json").unlink()
        return
    elif what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif what == "tokenizer damaged":
        (folder / "tokenizer.json").write_text("{")
    elif what == "no layer count":
        del config["num_hidden_layers"]
    (folder / "config.json").write_text("{" if what == "config damaged" else json.dumps(config))


MODELS: dict[str, tuple[str, ...]] = {
    "unknown architecture": ("llamma", "llama"),
    "vocabulary": ("280 token embeddings", "text.jsonl"),
    "weights of other shape": ("model.layers.0.mlp", "shape", "the config asks for (64, 96)"),
    "weights missing": ("safetensors", "model.init=scratch"),
    "weights cut": ("model.safetensors",),
    "weights of a smaller model": ("9 missing", "model.layers.2"),
    "no config": ("config.json",),
    "no tokenizer": ("tokenizer",),
    "tokenizer damaged": ("tokenizer.json",),
    "config damaged": ("config.json",),
}


@pytest.mark.usefixtures("plan_once")
@pytest.mark.parametrize("what", MODELS)
def test_a_bad_model_folder(
    what: str,
    skimp: Skimp,
    write_recipe: Callable[..., str],
    recipe: dict[str, Any],
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    damaged(tiny_folder, tmp_path / "model", what)
    refused(skimp("train", write_recipe({"model": str(tmp_path / "model")})), *MODELS[what])
    assert not Path(recipe["output"]).exists()  # also where weights were half loaded: no step was made


# ----------------------------------------------------------------------------------------- run folders
@pytest.mark.usefixtures("plan_once")
def test_output_folders(skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any], tmp_path: Path) -> None:
    """One run, then all that may not be done to its folder; each refusal leaves every byte as it was."""
    file, folder = write_recipe({"train.steps": 2}), recipe["output"]
    assert skimp("train", file).code == 0

    def bytes_of() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file() and p.name != ".lock"}

    before = bytes_of()
    refused(skimp("train", file), "another run's folder", "--resume", "output=")
    refused(skimp("train", folder), "has begun already", f"skimp train {folder} --resume")
    refused(
        skimp("train", file, "--resume", "train.lr=1e-3", "train.seed=5"),
        "train.lr: 0.01 -> 0.001", "train.seed: 0 -> 5", "change only train.steps",
    )  # fmt: skip
    refused(skimp("train", folder, "--resume", "train.lr=1e-3"), "train.lr", "change only train.steps")
    refused(skimp("train", folder, "--resume", "train.steps=1"), "train.steps: 2 -> 1, which is shorter")
    refused(skimp("train", file, "--resume", f"output={tmp_path / 'none'}"), "no run there")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    refused(skimp("train", file, f"output={tmp_path / 'mine'}"), "thesis.txt", "new or empty output folder")
    refused(skimp("train", str(tmp_path / "mine"), "--resume"), "no recipe.json")
    refused(skimp("train", file, f"output={tmp_path / 'mine' / 'thesis.txt'}"), "thesis.txt")
    assert bytes_of() == before
    done = skimp("train", folder, "--resume")
    assert done.code == 0
    assert "nothing to do" in done.out
    (Path(folder) / "recipe.json").write_text("{")
    refused(skimp("train", folder, "--resume"), "recipe.json", "damaged")


@pytest.mark.usefixtures("plan_once")
def test_half_written_checkpoints(skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any]) -> None:
    import skimp.api as api

    api.train(write_recipe(), voice=Heard(stop_at=2))
    saved = Path(recipe["output"]) / "checkpoints" / "step-00000002"
    model = saved / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-5] ^= 1
    model.write_bytes(bytes(data))
    refused(skimp("train", recipe["output"], "--resume"), "no complete checkpoint", "step-00000002", "crc32")
    model.write_bytes(bytes(data[:-100]))
    refused(skimp("train", recipe["output"], "--resume"), "no complete checkpoint", "model.safetensors has")
    (saved / "COMPLETE").unlink()
    refused(skimp("train", recipe["output"], "--resume"), "no complete checkpoint", "the save did not finish")


# ---------------------------------------------------------------------------------------- does not fit
@pytest.mark.slow  # the planner simulates every exact and approximate way
def test_a_budget_too_small_says_what_would_do(
    skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any]
) -> None:
    done = skimp("train", write_recipe({"budget": "100MB"}))
    refused(done, "within 100 MB", "smallest exact run takes", "budget=", code=3)
    assert "optimizer=" not in done.err  # the process itself is nearly all of it: no offer would get below by 2 %
    assert not Path(recipe["output"]).exists()
    enough = int(done.err.split("budget=")[1].split("MB")[0])
    assert skimp("train", write_recipe({"budget": f"{enough + 20}MB"})).code == 0


@pytest.mark.usefixtures("plan_once")
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_place_too_small(
    place: str,
    skimp: Skimp,
    write_recipe: Callable[..., str],
    recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import skimp.api as api
    from skimp.plan.plan import Alternative

    plain = api.plan_recipe

    def small(*words: Any, **options: Any) -> Any:
        found = plain(*words, **options)
        offer = Alternative("8-bit states", 90_000_000, 1.0, True, False, ("optimizer=adamw8bit",))
        tight = {"device_budget": 100_000_000} if place == "memory" else {"disk": 1_000_000}
        return replace(
            found,
            fits=False,
            places=replace(found.places, **tight),
            alternatives=(offer,),
            disk_bytes=5_000_000,
        )

    monkeypatch.setattr(api, "plan_recipe", small)
    done = skimp("train", write_recipe())
    if place == "memory":
        parts = (
            "within 100 MB on cpu",
            "the smallest exact run takes",
            "optimizer=adamw8bit: 90.0 MB; 8-bit states",
        )
    else:
        parts = ("1.00 MB of disk", "checkpoints take 5.00 MB", "checkpoint.keep=1")
    refused(done, *parts, code=3)
    assert "does not fit" in done.out  # the plan is shown, with its peak
    assert not Path(recipe["output"]).exists()


def test_a_budget_beyond_the_machine_is_planned_and_not_run(
    skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from skimp.recipe import HostBudget

    monkeypatch.setattr("skimp.recipe.host_budget", lambda: HostBudget(90_000_000, "a small machine"), raising=False)
    monkeypatch.setattr("skimp.plan.places.left_to_others", lambda available: 0)
    asked = write_recipe({"budget": "64GB"})
    assert skimp("plan", asked).code == 0
    refused(skimp("train", asked), "90.0 MB available on this machine", "budget=90MB", code=3)
    assert not Path(recipe["output"]).exists()


# ----------------------------------------------------------------------------------------------- words
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("plan",), ("neither a recipe nor --model",)),
        (("plan", "absent.yaml"), ("absent.yaml",)),
        (("train", "absent.yaml"), ("absent.yaml",)),
        (("plan", "--model", "llama-3-8b", "--gpu", "rtx-9999"), ("rtx-9999",)),
        (("plan", "--model", "llama-3-8b", "--gpu", "24GB", "--memory", "much"), ("memory", "'much'")),
        (("plan", "--model", "llama-3-8b", "--memory", "1e400GB"), ("memory", "'1e400GB'")),
        (("plan", "--model", "llama-3-8b", "--largest", "batch", "--html", "x.html"), ("--largest", "--html")),
        (("plan", "--model", "llama-3-8b", "--sweep", "batch=1", "--frontier", "x.svg"), ("--sweep", "--frontier")),
        (("plan", "--model", "llama-3-8b", "--sweep", "batch=1", "--markdown"), ("--sweep", "--markdown")),
        (("plan", "--model", "no-such-model"), ("no-such-model",)),
        (("plan", "--model", "llama-3-8b", "train.stpes=3"), ("train.stpes", "command line")),
        (("plan", "--model", "llama-3-8b", "nonsense"), ("a recipe 'nonsense'", "--model")),
        (("plan", "--model", "llama-3-8b", "train.steps=3", "nonsense"), ("nonsense", "key=value")),
        (("methods", "--attacks", "weigths"), ("--attacks weigths", "weights")),
    ],
)
def test_bad_words(words: tuple[str, ...], parts: tuple[str, ...], skimp: Skimp) -> None:
    refused(skimp(*words), *parts)


def test_a_file_that_is_no_yaml(skimp: Skimp, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("model: [\n")
    refused(skimp("train", str(tmp_path / "r.yaml")), "r.yaml")
    (tmp_path / "l.yaml").write_text("- a\n- b\n")
    refused(skimp("train", str(tmp_path / "l.yaml")), "l.yaml")
    (tmp_path / "b.yaml").write_bytes(b"model: caf\xe9\n")
    refused(skimp("train", str(tmp_path / "b.yaml")), "b.yaml")
    (tmp_path / "e.yaml").write_text("")
    refused(skimp("train", str(tmp_path / "e.yaml")), "e.yaml")


def test_usage_errors_are_two(skimp: Skimp) -> None:
    for words in (
        ("nothing",),
        ("plan", "--bogus"),
        ("train",),
        ("plan", "--model", "llama-3-8b", "--batch", "0"),
        ("plan", "--model", "llama-3-8b", "--largest", "batch", "--seq", "0"),
    ):
        done = skimp(*words)
        assert (done.code, "Traceback" in done.err) == (2, False)


def test_a_bug_keeps_its_traceback(
    skimp: Skimp, write_recipe: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("skimp.recipe.resolve_model", broken, raising=False)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        skimp("train", write_recipe())


def test_every_error_has_an_exit_code() -> None:
    found = [SkimpError, *SkimpError.__subclasses__()]
    assert {kind.__name__: kind.exit_code for kind in found if kind.exit_code != 2} == {
        "DoesNotFit": 3,
        "OutOfMemory": 3,
    }
