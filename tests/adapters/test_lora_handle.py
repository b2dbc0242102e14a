"""Attaching, the table, merging, detaching: what a person does with an adapter in any loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.adapters.lora import LoRA
from skimp.adapters.spec import Spec
from skimp.adapters.targets import TargetError
from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.structure import read_structure

IDS = torch.arange(1, 25).view(2, 12)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def trained(lora: LoRA, steps: int = 4, lr: float = 1e-2) -> LoRA:
    """The adapter after a few steps in a plain loop; the loss falls."""
    optimizer = torch.optim.AdamW(lora.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        model: Any = lora.model
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return lora


def state(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_step_zero_is_the_base_to_the_bit_and_only_additions_train(make_tiny: Callable[..., Any], family: str) -> None:
    model = make_tiny(family)
    before = logits(model)
    lora = LoRA(model, Spec(r=4))
    assert torch.equal(logits(model), before)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {n for n, _ in lora.named_parameters()}
    trained(lora)
    assert not torch.equal(logits(model), before)
    assert all(p.grad is None for _, p in lora.base())


def test_trained_numbers_are_r_times_inputs_and_outputs(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    lora = LoRA(model, Spec(r=3, targets=("q_proj", "down_proj")))
    expected = 2 * 3 * ((64 + 64) + (160 + 64))  # two blocks
    assert sum(p.numel() for p in lora.parameters()) == expected == sum(row.parameters for row in lora.table())
    assert [row.target for row in lora.table()] == ["q_proj", "down_proj"] * 2
    assert {row.shape for row in lora.table()} == {(64, 64), (64, 160)}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merge_gives_the_same_logits_and_unmerge_the_base(make_tiny: Callable[..., Any], family: str) -> None:
    model = make_tiny(family)
    lora = trained(LoRA(model, Spec(r=4, scale="rslora")))
    expected, base = logits(model), {n: p.clone() for n, p in lora.base()}
    merged = lora.merge(probe=lambda: logits(model))
    assert merged.logits is not None
    assert merged.logits < 1e-5
    assert merged.rounding < 1e-7 < merged.change
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    lora.unmerge()
    for name, p in lora.base():
        torch.testing.assert_close(p, base[name], rtol=0, atol=1e-6 * float(base[name].abs().max()))
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


def test_merge_into_bfloat16_is_measured(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama").to(torch.bfloat16)
    lora = trained(LoRA(model, Spec(r=4)))
    assert {p.dtype for p in lora.parameters()} == {torch.float32}
    weight = model.model.layers[0].self_attn.q_proj
    exact = weight.weight.float() + lora.scale["model.layers.0.self_attn.q_proj"] * (weight.lora_B @ weight.lora_A)
    merged = lora.merge()
    assert torch.equal(weight.weight, exact.to(torch.bfloat16))
    assert float((exact - weight.weight).detach().abs().max()) <= merged.rounding < 1e-2


@pytest.mark.parametrize("merge_first", [False, True])
def test_detach_restores_the_base_to_the_bit(make_tiny: Callable[..., Any], merge_first: bool) -> None:
    model = make_tiny("gpt2")
    model.transformer.wpe.weight.requires_grad_(False)
    before, shown, asked = state(model), logits(model), {n: p.requires_grad for n, p in model.named_parameters()}
    lora = trained(LoRA(model, Spec(r=4)))
    if merge_first:
        lora.merge(keep=True)
    lora.detach()
    after = state(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], before[n]) for n in before)
    assert torch.equal(logits(model), shown)
    assert asked == {n: p.requires_grad for n, p in model.named_parameters()}
    assert not any("forward" in vars(m) for m in model.modules())
    LoRA(model, Spec(r=2))  # and it takes another


def test_detach_that_could_not_restore_is_refused(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    lora = trained(LoRA(model, Spec(r=4)))
    lora.merge()
    with pytest.raises(ConflictError, match=r"keep=True"):
        lora.detach()
    lora.unmerge()
    lora.detach()
    original = {"lm_head.weight": model.lm_head.weight.detach().clone()}
    full = trained(LoRA(model, Spec(r=4, head=True)))
    with pytest.raises(ConflictError, match=r"lm_head\.weight trained in full"):
        full.detach()
    full.detach(original)
    assert torch.equal(model.lm_head.weight, original["lm_head.weight"])


def test_merging_twice_or_nothing_is_refused(make_tiny: Callable[..., Any]) -> None:
    lora = LoRA(make_tiny("llama"), Spec(r=2))
    with pytest.raises(ConflictError, match="nothing is merged"):
        lora.unmerge()
    lora.merge()
    with pytest.raises(ConflictError, match="merged already"):
        lora.merge()


def test_a_second_adapter_is_refused(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    LoRA(model, Spec(r=2))
    with pytest.raises(ConflictError, match=r"one addition a layer[\s\S]*merge or detach"):
        LoRA(model, Spec(r=2))


def test_tied_embedding_and_head_are_one_trained_matrix(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama", tie_word_embeddings=True)
    lora = LoRA(model, Spec(r=2, head=True))
    assert lora.full == ("model.embed_tokens",)
    assert lora.table()[0].target == "in full (tied with lm_head)"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.requires_grad


def test_rslora_is_standard_with_alpha_times_the_root_of_r(make_tiny: Callable[..., Any]) -> None:
    one = trained(LoRA(make_tiny("llama"), Spec(r=9, alpha=4.0, scale="rslora")))
    two = trained(LoRA(make_tiny("llama"), Spec(r=9, alpha=12.0)))
    assert torch.equal(logits(one.model), logits(two.model))


def test_the_first_numbers_do_not_depend_on_what_else_is_adapted(make_tiny: Callable[..., Any]) -> None:
    every, some = LoRA(make_tiny("llama"), Spec(r=4)), LoRA(make_tiny("llama"), Spec(r=4, targets=("v_proj",)))
    name = "model.layers.1.self_attn.v_proj"
    a = some.module(name).lora_A
    assert torch.equal(every.module(name).lora_A, a)
    assert float(a.detach().abs().max()) <= 1 / 8  # inputs 64
    assert not torch.equal(LoRA(make_tiny("llama"), Spec(r=4, seed=1)).module(name).lora_A, a)
    drawn = LoRA(make_tiny("llama"), Spec(r=4, init="gaussian")).module(name).lora_A
    assert 0.2 < float(drawn.detach().std()) < 0.3  # 1 / r


def test_a_saved_adapter_of_another_shape_is_refused(make_tiny: Callable[..., Any]) -> None:
    lora = LoRA(make_tiny("llama"), Spec(r=2))
    with pytest.raises(SkimpError, match=r"lora_A[\s\S]*this base needs \(2, 64\)"):
        lora.load(lambda name: torch.zeros(3, 64))


# ---------------------------------------------------------------------- targets
@pytest.mark.parametrize(
    ("targets", "count"),
    [
        ("all-linear", 14),
        (("q_proj",), 2),
        (("1.self_attn.q_proj", "up_proj"), 3),
        (r"model\.layers\.1\..*_proj", 7),
    ],
)
def test_targets(make_tiny: Callable[..., Any], targets: Any, count: int) -> None:
    assert len(LoRA(make_tiny("llama"), Spec(r=1, targets=targets)).modules) == count


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_proj", "v_porj"), r"'v_porj'[\s\S]*the other would: q_proj[\s\S]*did you mean 'v_proj'"),
        (("attention",), r"no linear layer[\s\S]*targets: down_proj, gate_proj"),
        (("embed_tokens",), r"token embedding[\s\S]*adapter\.embeddings=true"),
        (("lm_head",), r"output head[\s\S]*adapter\.head=true"),
        (("input_layernorm",), r"a LlamaRMSNorm[\s\S]*linear layer"),
        ("q_proj", r"adapter\.targets=\[q_proj\]"),
        (r".*\.q_porj", "no linear layer"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_by_name(
    make_tiny: Callable[..., Any], targets: Any, said: str
) -> None:
    model = make_tiny("llama")
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    with pytest.raises(TargetError, match=said):
        LoRA(model, Spec(targets=targets))
    assert before == {n: p.requires_grad for n, p in model.named_parameters()}


# ---------------------------------------------------------------------- did it do anything
def around_a_step(lora: LoRA) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    before = state(lora.model)
    trained(lora, steps=2)
    return before, state(lora.model)


def test_an_addition_that_does_not_move_is_named(make_tiny: Callable[..., Any]) -> None:
    lora = LoRA(make_tiny("llama"), Spec(r=2))
    before, after = around_a_step(lora)
    lora.assert_effect(before, after)
    name = "model.layers.1.mlp.up_proj"
    still = {n: before[n] if n.startswith(name) else p for n, p in after.items()}
    with pytest.raises(EffectError, match=rf"1 did not move, first {name}"):
        lora.assert_effect(before, still)


def test_mutations_are_seen(make_tiny: Callable[..., Any]) -> None:
    """A layer whose own forward came back, and a base weight that trains."""
    lora = LoRA(make_tiny("llama"), Spec(r=2))
    name = "model.layers.0.self_attn.k_proj"
    del lora.module(name).forward
    with pytest.raises(EffectError, match=name):
        lora.assert_effect(*around_a_step(lora))
    lora = LoRA(make_tiny("llama"), Spec(r=2))
    lora.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(EffectError, match=r"frozen base[\s\S]*model\.norm\.weight"):
        lora.assert_effect(*around_a_step(lora))


def test_a_spec_is_plain_values(make_tiny: Callable[..., Any]) -> None:
    spec = Spec(targets=("q_proj",), ranks={"model.layers.0.self_attn.q_proj": (3, 6.0)})
    assert Spec.from_dict(spec.as_dict()) == spec
    assert Spec.from_dict(Spec().as_dict()) == Spec()
    lora = LoRA(make_tiny("llama"), spec)
    assert [row.rank for row in lora.table()] == [3, 16]
    with pytest.raises(SkimpError, match=r"r 0"):
        replace(spec, r=0)
    assert read_structure(lora.model).head == "lm_head"
