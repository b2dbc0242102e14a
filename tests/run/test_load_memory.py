"""Weights and states go from their files straight into their places: a load and a resume take what was planned for
them, by c10's own events, and nothing is planned to be there twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from skimp.core.exact import ExactChoices
from skimp.core.memory.oracle import witness
from skimp.core.registry import load, methods
from skimp.data import synthetic_batch
from skimp.optim import role_groups, roles, state_key
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe
from skimp.run import checkpoint
from skimp.run.build import Run, build
from skimp.run.loop import State
from skimp.run.saving import Saver, _Lazily, open_newest, restore_optimizer, weights_from
from skimp.run.tensor_bytes import CHUNK
from skimp.run.weights import init_scratch, load_weights

#: A vocabulary several buffers large: a second copy of it, or of its states, would be seen.
ROWS, WIDTH = 40_000, 64
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": ROWS,
    "tie_word_embeddings": True,
}  # fmt: skip
RULES = [name for name, f in methods().items() if f.kind == "update rule"]
#: Ranks at which something is saved on matrices this small.
OPTIONS: dict[str, dict[str, Any]] = {"galore8bit": {"rank": 8}, "q-galore": {"rank": 8}}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(65, 131), nn.LayerNorm(131), nn.Linear(131, 97, bias=False))


def rule_of(name: str, net: nn.Module) -> Any:
    groups = role_groups(net.named_parameters(), 0.01, roles(net))
    return load(name, "update rule")(groups, lr=1e-3, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", RULES)
def test_states_of_every_rule_are_read_into_their_place_and_nowhere_else(tmp_path: Path, name: str) -> None:
    net = network().to(torch.bfloat16 if name == "adamw-bf16" else torch.float32)
    rule, again = rule_of(name, net), rule_of(name, net)
    for _ in range(2):
        for p in net.parameters():
            rule.step_parameter(p, torch.randn_like(p))
    named = {state_key(n, k): v for n, k, v in rule.named_state()}
    tensors = {n: v for n, v in named.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in named.items() if not isinstance(v, Tensor)}
    path = checkpoint.save(tmp_path, 2, {"optimizer": tensors.items()}, {}, keep=1)
    again.init_states()
    with checkpoint.load(path) as saved:
        _, seen = witness(lambda: again.load_named_state(_Lazily(saved, numbers)))
    assert seen.peak == 0
    found = {state_key(n, k): v for n, k, v in again.named_state()}
    assert found.keys() == named.keys()
    for key, value in named.items():
        assert torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value, key


def recipe(**changes: Any) -> Any:
    values = {
        "model": "tiny", "data": {"train": "pydoc", "seq_len": 16, "validation": None}, "eval": None,
        "train": {"steps": 2, "batch_tokens": 32}, "output": "runs/loading", **changes,
    }  # fmt: skip
    return load_recipe(values, [])


def scratch(model: nn.Module) -> None:
    init_scratch(model, 0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "adamw8bit"}, {"precision": "bf16"}, {"exact": {"offload": {"optimizer": "disk"}}}],
    ids=["plain", "8-bit", "bf16", "disk"],
)
def test_a_resume_takes_what_was_planned_for_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    described = recipe(**changes, output=str(tmp_path / "run"))
    exact = ExactChoices(2, states="disk" if "exact" in changes else "device")
    planned = simulate(described, exact, CONFIG).phases["resume"]
    run = build(described, exact, CONFIG, fill=scratch)
    run.step(synthetic_batch(16, 2, 512, (0, 15, 16)))
    stream = SimpleNamespace(state_dict=dict)
    Saver(tmp_path / "saved", 1, {}).save(SimpleNamespace(run=run, stream=stream, state=State()))  # type: ignore[arg-type]
    run.close()
    del run

    def resume() -> Run:
        with open_newest(tmp_path / "saved") as saved:
            found = build(described, exact, CONFIG, fill=weights_from(saved))
            restore_optimizer(saved, found)
        return found

    resumed, seen = witness(resume)
    resumed.close()
    assert planned - 2 * CHUNK <= seen.peak <= planned


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("written", [torch.float32, torch.bfloat16])
def test_a_load_takes_what_was_planned_for_it(tmp_path: Path, precision: str, written: torch.dtype) -> None:
    """A file of another dtype is cast piece by piece, to the bits of a whole cast."""
    described, exact = recipe(precision=precision), ExactChoices(2)
    source = build(described, exact, CONFIG, fill=scratch)
    tensors = {n: p.detach().to(written, copy=True) for n, p in source.model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    profile = simulate(described, exact, CONFIG)
    model = source.model
    for p in model.parameters():
        p.detach().zero_()
    _, seen = witness(lambda: load_weights(model, tmp_path))
    assert profile.resting["weights"] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert seen.peak <= (0 if model.dtype == written else CHUNK)
    assert profile.phases["load"] >= profile.resting["weights"] + seen.peak
    assert all(torch.equal(p, tensors[n].to(model.dtype)) for n, p in model.named_parameters())
    source.close()


def test_a_cast_is_asked_for_and_never_of_another_shape(tmp_path: Path) -> None:
    from skimp.core.errors import CheckpointError
    from skimp.run.safetensors_stream import SafetensorsReader

    save_file({"w": torch.randn(3, 5)}, tmp_path / "f.safetensors")
    with SafetensorsReader(tmp_path / "f.safetensors") as reader:
        with pytest.raises(CheckpointError, match="float32"):
            reader.read_into("w", torch.zeros(3, 5, dtype=torch.bfloat16))
        with pytest.raises(CheckpointError, match=r"\[3, 5\]"):
            reader.read_into("w", torch.zeros(5), cast=True)
        target = torch.zeros(5, 3, dtype=torch.float64).t()
        reader.read_into("w", target, cast=True)
        assert torch.equal(target, reader.read("w").double())
