"""Heads and channels moved as wholes: the function stays for every attention, and weights come back to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from skimp.adapters import permute
from skimp.adapters.coupled import Member, coupled
from skimp.adapters.permute import channel_order, head_order
from skimp.core.errors import ModelError
from skimp.core.structure import read_structure

IDS = torch.arange(1, 25).view(2, 12)
BIASES = {"attention_bias": True, "mlp_bias": True}
#: name -> family, changes of its configuration
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("llama", {"num_key_value_heads": 4}),
    "mha-biases": ("llama", {"num_key_value_heads": 4, **BIASES}),
    "gqa": ("llama", {}),
    "gqa-biases": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, **BIASES}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "mqa-biases": ("llama", {"num_key_value_heads": 1, **BIASES}),
    "qkv-biases": ("qwen2", {}),
    "fused-transposed": ("gpt2", {}),
}


def jittered(model: Any) -> Any:
    """Biases and gains away from 0 and 1, where a forgotten permutation could not be seen."""
    with torch.no_grad():
        for index, p in enumerate(model.parameters()):
            if p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)))
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def tuned_of(model: Any) -> dict[str, list[int]]:
    """The last key/value head, the first query head, the last and a middle channel."""
    found: dict[str, list[int]] = {}
    for block in coupled(model, read_structure(model)):
        assert block.heads is not None
        h = block.heads
        found[h.v.module] = [h.v.offset + (h.kv - 1) * h.size + i for i in range(h.size)]
        found[h.o.module] = list(range(h.size))
        for c in block.channels:
            found[c.up.module] = [c.up.offset + at for at in (7, c.count - 1)]
            found[c.down.module] = [3, c.count - 1]
    return found


@pytest.mark.parametrize("case", CASES)
def test_co_permutation_leaves_logits_and_comes_back_to_the_bit(make_tiny: Callable[..., Any], case: str) -> None:
    family, changes = CASES[case]
    model = jittered(make_tiny(family, **changes))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    before, tuned = logits(model), tuned_of(model)
    moved = permute.moves(model, read_structure(model), tuned)
    permute.apply(model, moved)
    still = [n for n, p in model.named_parameters() if torch.equal(p, weights[n])]
    alone = {n for n in tuned if n.endswith("v_proj")} if changes.get("num_key_value_heads") == 1 else set()
    assert {m.module for m, _ in moved} >= set(tuned) - alone  # one key/value head has nowhere to go
    assert len(still) < len(weights)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)
    for name, index in tuned.items():
        at = sorted(permute.places(index, moved, name))
        assert at == list(range(at[0], at[0] + len(at)))
    permute.apply(model, moved, back=True)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_output_biases_stay_and_inner_ones_move(make_tiny: Callable[..., Any]) -> None:
    model = jittered(make_tiny("llama", **BIASES))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("bias")}
    permute.apply(model, permute.moves(model, read_structure(model), tuned_of(model)))
    kept = {n.split(".")[-2] for n, p in model.named_parameters() if n in before and torch.equal(p, before[n])}
    assert kept == {"o_proj", "down_proj"}


@pytest.mark.parametrize("name", ["Qwen3", "Phi3", "OPT"])
def test_other_families(name: str) -> None:
    """Norms of queries and keys; one matrix for q, k and v and one for gate and up; biases and ReLU."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    more: dict[str, Any] = {
        "Qwen3": {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16},
        "Phi3": {"intermediate_size": 96, "num_key_value_heads": 2},
        "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    }[name]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **more, **ids)
    model = jittered(getattr(transformers, f"{name}ForCausalLM")(config))
    before = logits(model)
    moved = permute.moves(model, read_structure(model), tuned_of(model))
    assert len(moved) >= 6
    permute.apply(model, moved)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-5)


def test_channels_stand_in_the_order_only_first_both_only_second_rest() -> None:
    assert channel_order(7, [1, 4], [4, 6]) == [1, 4, 6, 0, 2, 3, 5]


def test_query_heads_stay_with_their_key_and_value_head(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama", num_attention_heads=8, num_key_value_heads=4)
    heads = coupled(model, read_structure(model))[0].heads
    assert heads is not None
    queries, groups = head_order(heads, v=[2], o=[3, 4, 5])
    assert groups == [2, 1, 0, 3]
    assert queries == [4, 5, 3, 2, 0, 1, 6, 7]
    assert [q // 2 for q in queries[::2]] == groups == [q // 2 for q in queries[1::2]]


def test_heads_that_cannot_be_told_apart_are_refused(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    model.config.num_key_value_heads = 3
    with pytest.raises(ModelError, match=r"4 query and 3 key/value heads[\s\S]*cannot be told apart[\s\S]*channels"):
        coupled(model, read_structure(model))
    assert coupled(model, read_structure(model), heads=False)[0].channels[0].count == 160
    config = transformers.GPTNeoXConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=99
    )
    with pytest.raises(ModelError, match="gpt_neox"):
        coupled(transformers.GPTNeoXForCausalLM(config), read_structure(transformers.GPTNeoXForCausalLM(config)))


def test_what_belongs_to_heads_beside_the_projections_is_refused(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ModelError, match=r"sinks of shape \(4,\)[\s\S]*permute=false"):
        permute.moves(model, read_structure(model), tuned_of(model))


def test_a_member_with_an_offset_is_found_again() -> None:
    moved = [(Member("layer", "rows", 10), (2, 0, 1))]
    assert permute.places([12, 10, 3], moved, "layer") == [10, 11, 3]
    assert permute.places([12], moved, "another") == [12]
