"""ReLoRA: outputs stay across a restart, moments begin anew, ranks add up, what has moved is saved and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.adapters.merge import Sums
from skimp.adapters.relora import ReLoRA
from skimp.adapters.spec import Spec
from skimp.core.codecs.nf4 import NF4
from skimp.core.coded_model import encode_model
from skimp.core.errors import ConflictError, EffectError
from skimp.core.memory.tracker import Tracker
from skimp.core.structure import read_structure
from skimp.optim import AdamW

IDS = torch.arange(1, 25).view(2, 12)
NAME = "model.layers.0.mlp.up_proj"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def attached(model: Any, r: int = 2) -> tuple[ReLoRA, Any]:
    lora = ReLoRA(model, Spec(r=r, name="relora"), every=3, warmup=1)
    return lora, AdamW(lora.named_parameters(), lr=1e-2)


def steps(lora: ReLoRA, optimizer: Any, count: int) -> None:
    for _ in range(count):
        model: Any = lora.model
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_outputs_stay_and_moments_and_their_steps_are_zero(make_tiny: Callable[..., Any], family: str) -> None:
    lora, optimizer = attached(make_tiny(family))
    steps(lora, optimizer, 3)
    before, drawn = logits(lora.model), {n: p.clone() for n, p in lora.named_parameters()}
    lora.restart(optimizer)
    torch.testing.assert_close(logits(lora.model), before, rtol=0, atol=1e-5)
    for name, p in lora.named_parameters():
        assert not p.any() if name.endswith("lora_B") else not torch.equal(p, drawn[name])
        state = optimizer.state[p]
        assert all(not v.any() if isinstance(v, Tensor) else v == 0 for v in state.values())
    first = {n: p.detach().clone() for n, p in lora.named_parameters() if n.endswith("lora_B")}
    steps(lora, optimizer, 1)
    moved = max(float((dict(lora.named_parameters())[n] - p).detach().abs().max()) for n, p in first.items())
    assert moved < 1.01e-2  # one lr: with the old step count it would be 3 times as much


def test_ranks_of_several_cycles_add_up(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    original = model.get_submodule(NAME).weight.detach().double().clone()
    lora, optimizer = attached(model)
    for cycle in range(1, 4):
        steps(lora, optimizer, 3)
        lora.restart(optimizer)
        change = model.get_submodule(NAME).weight.detach().double() - original
        # A float32 weight rounds each merge by 6e-8 of it, far below what a cycle adds.
        values = torch.linalg.svdvals(change)
        assert int((values > 1e-4 * values[0]).sum()) == 2 * cycle


def test_numbers_of_a_cycle_depend_on_its_count_alone(make_tiny: Callable[..., Any]) -> None:
    one, other = (attached(make_tiny("llama"))[0] for _ in range(2))
    one.restart()
    other.load_values({"restarts": 4})
    other.restart()
    a, b = (x.module(NAME).lora_A for x in (one, other))
    assert not torch.equal(a, b)
    again = attached(make_tiny("llama"))[0]
    again.restart()
    assert torch.equal(a, again.module(NAME).lora_A)


def test_what_is_saved_is_the_model_and_rebuilds_it(make_tiny: Callable[..., Any]) -> None:
    base = make_tiny("llama")
    lora, optimizer = attached(make_tiny("llama"))
    steps(lora, optimizer, 3)
    lora.restart(optimizer)
    steps(lora, optimizer, 2)
    saved = {n: t.detach().clone() for n, t in lora.named_state()}
    again = ReLoRA.rebuild(make_tiny("llama"), read_structure(base), lora.meta())
    again.load(saved.__getitem__)
    again.load_values(lora.values())
    assert (again.every, again.warmup, again.restarts) == (3, 1, 1)
    assert torch.equal(logits(again.model), logits(lora.model))
    sums = ReLoRA.merging(lora.meta(), frozenset(saved), saved.__getitem__)
    assert isinstance(sums, Sums)
    for name in sums.changed:
        with torch.no_grad():
            base.get_submodule(name.removesuffix(".weight")).weight.copy_(
                sums.apply(name, saved[name].clone(), transposed=False)
            )
    torch.testing.assert_close(logits(base), logits(lora.model), rtol=0, atol=1e-5)


def test_what_cannot_be_is_refused(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    lora, optimizer = attached(model)
    with pytest.raises(EffectError, match="no factor has moments"):
        lora.restart(optimizer)
    with pytest.raises(ConflictError, match=r"PEFT's format[\s\S]*--to merged"):
        lora.peft("base")
    steps(lora, optimizer, 1)
    lora.restart(optimizer)
    with pytest.raises(ConflictError, match=r"2 restarts have changed 14 weights"):
        lora.detach()
    lora.detach(before)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    coded = make_tiny("llama")
    encode_model(coded, read_structure(coded), NF4())
    with pytest.raises(ConflictError):
        attached(coded)


def test_a_restart_takes_what_it_says(make_tiny: Callable[..., Any]) -> None:
    lora, optimizer = attached(make_tiny("llama"))
    steps(lora, optimizer, 1)
    tracker = Tracker()
    with tracker:
        tracker.hold(lora.model.parameters(), "weights")
        tracker.hold((v for _, _, v in optimizer.named_state() if isinstance(v, Tensor)), "optimizer")
        rest = tracker.live
        lora.restart(optimizer)
    assert tracker.live == rest
    assert 0 < tracker.peak.total - rest <= lora.peaks()["restart"]
