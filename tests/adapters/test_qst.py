"""QST: step 0 is the backbone, of which nothing is kept; gradients are those of constants; decoding is cached."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from skimp.adapters.qst import QST, SIDE
from skimp.adapters.side_down import downsampler, parameters_of, read_form
from skimp.core import attention
from skimp.core.errors import ConflictError, SkimpError
from skimp.core.structure import read_structure

D, HEADS, BLOCKS = 48, 4, 3
DOWNS = ("adapter:5", "lora:4", "linear", "avgpool", "maxpool")


def tiny(kind: str = "llama", hidden: int = D, blocks: int = BLOCKS) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config: Any = GPT2Config(
            n_embd=hidden, n_layer=blocks, n_head=HEADS, vocab_size=67, n_positions=64,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
    else:
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=blocks, num_attention_heads=HEADS,
            num_key_value_heads=2, vocab_size=67, max_position_embeddings=64,
        )  # fmt: skip
    config._attn_implementation = attention.register()
    return (GPT2LMHeadModel if kind == "gpt2" else LlamaForCausalLM)(config).eval()


def attached(model: Any, **asked: Any) -> QST:
    return QST(model, read_structure(model), **{"reduce": 2, "down": "adapter:5", **asked})


def ids(rows: int = 2, seq: int = 11) -> Tensor:
    return torch.randint(0, 67, (rows, seq), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("down", DOWNS)
def test_step_0_is_the_backbone_to_the_bit_and_sigmoid_is_a_quarter_percent_off(kind: str, down: str) -> None:
    model, tokens = tiny(kind), ids()
    plain = model(tokens).logits
    qst = attached(model, down=down)
    assert torch.equal(model(tokens).logits, plain)
    qst.detach()
    assert torch.equal(model(tokens).logits, plain)
    assert not hasattr(model, SIDE)
    assert all(p.requires_grad for p in model.parameters())

    attached(model, down=down, gate="sigmoid")
    a = 1.0 / (1.0 + torch.exp(torch.tensor(-6.0)))
    torch.testing.assert_close(model(tokens).logits, plain * a, rtol=1e-4, atol=1e-5)


def test_nothing_of_the_backbone_is_kept_or_trained() -> None:
    model, tokens = tiny(), ids()
    qst = attached(model)
    taps, inside, kept = [], [False], []

    def left(out: Any) -> None:
        inside[0] = False
        taps.append(out)

    for name in qst.backbone.blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))  # after the side's own look at f_0
        block.register_forward_hook(lambda _m, _i, out: left(out), prepend=True)

    def pack(t: Tensor) -> Tensor:
        if inside[0]:
            kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model, tokens)
    assert not kept
    assert all(not (t if isinstance(t, Tensor) else t[0]).requires_grad for t in taps)
    loss.backward()
    assert all(p.grad is None for n, p in model.named_parameters() if not n.startswith(SIDE))
    # The first step at a = 1: the gate alone.
    grads = {n: p.grad for n, p in qst.side.named_parameters()}
    assert grads["gate"].abs().sum() > 0
    assert all(g is None or not g.any() for n, g in grads.items() if n != "gate")
    assert qst.asleep() == {f"{SIDE}.{n}" for n in grads if n != "gate"}


@pytest.mark.parametrize("down", DOWNS)
def test_gradients_are_those_of_a_plain_side_network_on_constants(down: str) -> None:
    model = tiny().double()
    tokens = ids()
    structure = read_structure(model)
    taps = model.model(tokens, output_hidden_states=True).hidden_states
    blocks = []
    modules = [model.get_submodule(n) for n in structure.blocks]
    hooks = [m.register_forward_hook(lambda _m, _i, out: blocks.append(out)) for m in modules]
    last = model.model(tokens).last_hidden_state
    for hook in hooks:
        hook.remove()
    taps = [taps[0].detach(), *(b.detach() for b in blocks)]
    qst = attached(model, down=down)
    qst.side.double()
    with torch.no_grad():
        qst.side.gate.fill_(0.3)
    side: Any = copy.deepcopy(qst.side)
    loss_of(model, tokens).backward()

    positions = torch.arange(tokens.shape[1]).unsqueeze(0)
    h = side.rungs[0].down(taps[0])
    for rung, tap in zip(side.rungs, taps[1:], strict=True):
        b = torch.sigmoid(rung.z)
        h = (1 - b) * rung.down(tap) + b * h
        out = rung.block(h, position_ids=positions, position_embeddings=side.rotary(h, positions))
        h = out if isinstance(out, Tensor) else out[0]
    out = (1 - side.gate) * side.up(side.norm(h)) + side.gate * last.detach()
    logits = model.lm_head(out)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for (name, found), wanted in zip(qst.side.named_parameters(), side.parameters(), strict=True):
        assert wanted.grad is not None, name
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("down", DOWNS)
def test_trained_numbers_are_what_the_formula_says(down: str) -> None:
    qst = attached(tiny(), down=down)
    d, inner, r, kv = D, 2 * D, 2, 2 / HEADS
    block = (2 * d * d + 2 * d * d * kv + 3 * d * inner) / r**2 + 2 * d // r  # q, o; k, v; MLP; two norms
    wanted = BLOCKS * (block + parameters_of(down, d, d // r) + d // r)  # and z
    wanted += d * d // r + d + d // r + d  # Up with its bias, the side's norm, the gate
    assert sum(p.numel() for p in qst.parameters()) == wanted
    assert sum(row.parameters for row in qst.table()) == wanted


def kept_bytes(down: str, reduce: int, hidden: int = 64) -> int:
    """Bytes kept for backward below the gate, all storages once."""
    model, tokens = tiny(hidden=hidden, blocks=2), ids(1, 24)
    attached(model, down=down, reduce=reduce)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model.model(tokens).last_hidden_state
    top = 2 * 24 * hidden * 4  # norm(f_L) and Up h
    assert out.requires_grad
    return sum(size for at, size in held.items() if at not in weights) - top


def test_pools_keep_no_hidden_state_and_activations_halve_when_r_doubles() -> None:
    taps = 3 * 24 * 64 * 4
    assert kept_bytes("linear", 2) - kept_bytes("avgpool", 2) >= taps
    two, four = kept_bytes("avgpool", 2), kept_bytes("avgpool", 4)
    assert 0.45 < four / two < 0.6  # angles, norms' scales and the softmax's sums do not shrink with r
    # At one width of the side, the width of the backbone is nothing to it.
    assert kept_bytes("avgpool", 4, hidden=128) == pytest.approx(two, rel=0.02)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_cached_decoding_is_the_whole_forward(kind: str) -> None:
    model, tokens = tiny(kind), ids(1, 9)
    qst = attached(model)
    with torch.no_grad():
        qst.side.gate.fill_(0.4)
        whole = model(tokens).logits
        cache = DynamicCache()
        parts = [
            model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True, position_ids=torch.tensor([[i]])).logits
            for i in range(tokens.shape[1])
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    assert len(cache.layers) == 2 * BLOCKS  # the side's behind the backbone's
    assert cache.layers[-1].keys.shape[-1] == cache.layers[0].keys.shape[-1] // 2


def test_training_lowers_the_loss_and_a_side_goes_onto_another_copy_of_the_backbone() -> None:
    model, tokens = tiny(), ids(4, 16)
    qst = attached(model)
    rule = torch.optim.AdamW(qst.parameters(), lr=2e-2)
    before = float(loss_of(model, tokens).detach())
    for _ in range(40):
        loss = loss_of(model, tokens)
        loss.backward()
        rule.step()
        rule.zero_grad()
    after = loss_of(model, tokens).detach()
    assert float(after) < 0.8 * before
    saved = {n: p.detach().clone() for n, p in qst.named_parameters()}

    again = QST.rebuild(tiny(), read_structure(tiny()), qst.meta())
    again.load(saved.__getitem__)
    assert torch.equal(loss_of(again.model, tokens), after)


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(ConflictError, match=r"(?s)reduce=5.*whole even number.*adapter.reduce=6"):
        attached(tiny(), reduce=5)
    with pytest.raises(ConflictError, match="4 heads of 12"):
        attached(tiny(), reduce=4)  # heads of 3 numbers cannot be turned by halves
    assert attached(tiny("gpt2"), reduce=4).side.rotary is None
    with pytest.raises(SkimpError, match="'adapter:0'"):
        attached(tiny(), down="adapter:0")
    with pytest.raises(SkimpError, match="narrower"):
        downsampler("lora:99", D, 24)
    assert read_form("maxpool") == ("maxpool", 0)
    model = tiny()
    qst = attached(model)
    with pytest.raises(ConflictError, match="it has one"):
        attached(model)
    with pytest.raises(ConflictError, match="modules of its own"):
        qst.merge()
    with pytest.raises(ConflictError, match="PEFT"):
        qst.peft("base")
