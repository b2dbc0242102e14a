"""S2A: shifts keep no layer's input, prompts are keys and values before the text, both leave without a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from skimp.activations.derivative import Coding
from skimp.activations.derivative_apply import Derivatives
from skimp.adapters.s2a import S2A, SHIFT
from skimp.core import attention
from skimp.core.errors import ConflictError
from skimp.core.structure import read_structure


def tiny(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config: Any = GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0,
        )  # fmt: skip
    else:
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=67, max_position_embeddings=64,
        )  # fmt: skip
    config._attn_implementation = attention.register()
    return (GPT2LMHeadModel if kind == "gpt2" else LlamaForCausalLM)(config)


def attached(model: Any, **asked: Any) -> S2A:
    return S2A(model, read_structure(model), **{"prompt": 3, "rank": 2, **asked})


def ids(rows: int = 2, seq: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(0, 67, (rows, seq), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("shape", [(7, 12), (2, 5, 12)])
def test_a_shifted_frozen_layer_keeps_its_weight_alone_and_gradients_are_autograds(shape: tuple[int, ...]) -> None:
    model = tiny()
    layer: Any = nn.Linear(12, 9, bias=False)
    model.model.layers[0].mlp.extra = layer
    s2a = attached(model, prompt=0)
    assert "model.layers.0.mlp.extra" in s2a.linears
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    assert {t.untyped_storage().data_ptr() for t in kept} == {layer.weight.untyped_storage().data_ptr()}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    dx, dshift = torch.autograd.grad(y, [x, layer.s2a_shift], dy)
    b = torch.zeros(9, requires_grad=True)
    wanted = torch.autograd.grad(F.linear(x, layer.weight, b), [x, b], dy)
    torch.testing.assert_close((dx, dshift), wanted)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_shifts_begin_at_the_model_and_all_of_it_leaves_to_the_bit(kind: str) -> None:
    model, tokens = tiny(kind), ids()
    plain = model(tokens).logits
    s2a = attached(model, prompt=0)
    assert torch.equal(model(tokens).logits, plain)
    s2a.detach()
    s2a = attached(model)
    assert not torch.equal(model(tokens).logits, plain)  # prompts share the attention
    s2a.detach()
    assert torch.equal(model(tokens).logits, plain)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(hasattr(m, "skimp_prefix") for m in model.modules())


def test_prompts_are_attended_to_by_every_position_without_being_turned() -> None:
    """Against attention written out with the prompts' keys and values before the text's, in float64."""
    model = tiny().double()
    s2a = attached(model, bias=False)
    block = model.model.layers[0]
    seen: list[Any] = []
    block.self_attn.o_proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    inputs: list[Any] = []
    block.self_attn.register_forward_pre_hook(lambda _m, a, k: inputs.append(k), with_kwargs=True)
    tokens = ids(2, 7)
    model(tokens)
    x, (cos, sin) = inputs[0]["hidden_states"], inputs[0]["position_embeddings"]
    attn, p = block.self_attn, 3
    made = (attn.s2a_prompt_B @ attn.s2a_prompt_A).unsqueeze(0).expand(2, -1, -1)

    def heads(t: Tensor, n: int) -> Tensor:
        return t.view(2, t.shape[1], n, 8).transpose(1, 2)

    def turned(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return t * cos.unsqueeze(1) + torch.cat([-b, a], -1) * sin.unsqueeze(1)

    q, k = turned(heads(attn.q_proj(x), 4)), turned(heads(attn.k_proj(x), 2))
    k = torch.cat([heads(attn.k_proj(made), 2), k], 2).repeat_interleave(2, 1)
    v = torch.cat([heads(attn.v_proj(made), 2), heads(attn.v_proj(x), 2)], 2).repeat_interleave(2, 1)
    mask = torch.ones(7, 7 + p, dtype=torch.bool).tril(p)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf"))
    wanted = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(seen[0], wanted, rtol=1e-9, atol=1e-12)
    loss_of(model, tokens).backward()
    assert all(q.grad is not None and q.grad.abs().sum() > 0 for q in s2a.parameters())


def test_each_packed_document_sees_the_prompts_and_no_other_document() -> None:
    model = tiny().double()
    attached(model, bias=False)
    one, two = ids(1, 5, seed=4), ids(1, 8, seed=5)
    alone = [model(t).logits for t in (one, two)]
    positions = torch.cat([torch.arange(5), torch.arange(8)]).unsqueeze(0)
    with attention.declared(((0, 5, 13),)):
        packed = model(torch.cat([one, two], 1), position_ids=positions).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoding_over_a_cache_is_the_whole_forward(kind: str) -> None:
    model, tokens = tiny(kind).eval(), ids(1, 9)
    attached(model)
    with torch.no_grad():
        whole, cache = model(tokens).logits, DynamicCache()
        pieces = [(0, 4), (4, 5), (5, 9)]
        parts = [
            model(
                tokens[:, a:b], past_key_values=cache, use_cache=True, position_ids=torch.arange(a, b).unsqueeze(0)
            ).logits
            for a, b in pieces
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 9  # the text alone


def test_shifts_merge_where_there_are_biases_and_nowhere_else() -> None:
    model, tokens = tiny("gpt2"), ids()
    s2a = attached(model, prompt=0)
    with torch.no_grad():
        for p in s2a.parameters():
            p.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(7))
    trained = model(tokens).logits
    before = {n: p.clone() for n, p in model.named_parameters()}
    merged = s2a.merge(keep=True, probe=lambda: model(tokens).logits)
    assert merged.modules == len(s2a.linears)
    torch.testing.assert_close(model(tokens).logits, trained, rtol=1e-5, atol=1e-5)
    s2a.unmerge()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(model(tokens).logits, trained)

    with pytest.raises(ConflictError, match=r"no bias in model\.layers\.0"):
        attached(tiny(), prompt=0).merge()
    with pytest.raises(ConflictError, match="prompts"):
        attached(tiny("gpt2")).merge()
    with pytest.raises(ConflictError, match="PEFT"):
        s2a.peft("base")
    with pytest.raises(ConflictError, match="nothing that trains"):
        attached(tiny(), bias=False, prompt=0)
    with pytest.raises(ConflictError, match="it has them"):
        attached(model)


def trained(coded: bool) -> tuple[float, int]:
    """Loss after 40 steps, and bytes kept for backward by a forward of the base."""
    model, tokens = tiny(), ids(4, 32) % 4  # few words: a shift before the head tells them from the others
    s2a = attached(model)
    if coded:
        Derivatives(model, read_structure(model), Coding())
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.model(tokens)
    rule = torch.optim.AdamW(s2a.parameters(), lr=3e-2)
    loss = loss_of(model, tokens)
    for _ in range(40):
        loss.backward()
        rule.step()
        rule.zero_grad()
        loss = loss_of(model, tokens)
    return float(loss.detach()), sum(size for at, size in held.items() if at not in weights)


def test_coded_activations_train_as_well_and_keep_about_half() -> None:
    (exact, whole), (coded, less) = trained(False), trained(True)
    start = float(loss_of(tiny(), ids(4, 32) % 4).detach())
    assert exact < start - 0.3
    assert abs(coded - exact) < 0.1 * (start - exact)
    assert less < 0.55 * whole  # the rest is attention's; blocks of 32 are half empty at this width


def test_a_saved_one_goes_onto_the_model_again() -> None:
    model, tokens = tiny(), ids()
    s2a = attached(model)
    with torch.no_grad():
        for p in s2a.parameters():
            p.add_(0.1)
    saved = {n: p.detach().clone() for n, p in s2a.named_state()}
    again = S2A.rebuild(tiny(), read_structure(model), s2a.meta())
    again.load(saved.__getitem__)
    assert torch.equal(again.model(tokens).logits, model(tokens).logits)
    assert sum(row.parameters for row in again.table()) == sum(p.numel() for p in s2a.parameters())
    assert any(n.endswith(SHIFT) for n in saved)


def test_prompts_that_a_models_own_attention_would_never_see_are_refused() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=31
    )
    model = LlamaForCausalLM(config)
    with pytest.raises(ConflictError, match="never see"):
        S2A(model, read_structure(model), prompt=4)
    assert S2A(model, read_structure(model), prompt=0).linears
