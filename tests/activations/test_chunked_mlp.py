"""MLPs in chunks of tokens against whole ones: loss and every gradient, masks, bytes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

from skimp.activations.chunked_mlp import ChunkedMLP, has_mlp
from skimp.activations.recompute import Recompute
from skimp.adapters.lora import LoRA
from skimp.adapters.spec import Spec
from skimp.core.chunked import chunked
from skimp.core.errors import ConflictError, EffectError
from skimp.core.memory.oracle import witness
from skimp.core.position import declared_position, position
from skimp.core.structure import read_structure
from skimp.kernels.apply import Fused
from skimp.kernels.native import library

TOKENS = 23


def model_of(kind: str = "llama", dtype: torch.dtype = torch.float64, width: int = 32, inner: int = 56) -> nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        config: Any = LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=61, max_position_embeddings=8192, tie_word_embeddings=True,
        )  # fmt: skip
    elif kind == "gpt2":
        config = GPT2Config(
            n_embd=width, n_layer=2, n_head=4, vocab_size=61, n_positions=64,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    else:
        config = OPTConfig(
            hidden_size=width, ffn_dim=inner, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
            word_embed_proj_dim=width, dropout=0.0,
        )  # fmt: skip
    made: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).train()
    return made


def loss_of(model: Any, rows: int) -> Tensor:
    ids = torch.randint(0, 61, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    with declared_position(3, 5):
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients(model: nn.Module, rows: int = 1, micro_batches: int = 1) -> dict[str, Tensor]:
    model.zero_grad()
    found = {"loss": torch.zeros(())}
    for _ in range(micro_batches):
        loss = loss_of(model, rows)
        loss.backward()
        found["loss"] = loss.detach()
    return found | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / other[n].norm().clamp_min(1e-30)) for n in one)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_loss_and_every_gradient_equal_the_whole_for_every_chunk(kind: str, rows: int) -> None:
    model = model_of(kind)
    want = gradients(model, rows)
    for chunk in (1, 5, TOKENS, 1000):  # none divides the tokens but the first; the last is larger than them
        mlps = ChunkedMLP(model, read_structure(model), chunk)
        assert gap(gradients(model, rows), want) < 1e-12
        mlps.remove()
    assert gap(gradients(model, rows), want) == 0.0


def test_three_micro_batches_add_up_to_the_sum_of_three_plain_gradients() -> None:
    """Of one chunk's gradient counted twice, an Adam step of one micro-batch would show nothing."""
    model = model_of()
    want = gradients(model, micro_batches=3)
    ChunkedMLP(model, read_structure(model), 7)
    assert gap(gradients(model, micro_batches=3), want) < 1e-12


def test_one_chunk_is_bit_equal_in_float32() -> None:
    model = model_of(dtype=torch.float32)
    want = gradients(model)
    ChunkedMLP(model, read_structure(model), TOKENS)
    assert gap(gradients(model), want) == 0.0


@pytest.mark.skipif(not library.available(), reason="no native kernels")
@pytest.mark.parametrize("recomputed", [False, True])
def test_over_fused_layers_the_norms_own_input_is_kept(recomputed: bool) -> None:
    model = model_of(dtype=torch.float32)
    fused = Fused(model)
    want = gradients(model, 2)
    mlps = ChunkedMLP(model, read_structure(model), 5)
    if recomputed:
        Recompute(model, read_structure(model).blocks)
    assert gap(gradients(model, 2), want) < 1e-5
    fused.assert_effect()
    mlps.assert_effect(1)


def test_a_recomputed_block_runs_its_mlp_no_more_often_than_without_chunks() -> None:
    model = model_of()
    structure = read_structure(model)
    seen = []
    for module in (model.get_submodule(f"{block}.mlp") for block in structure.blocks):
        plain = module.forward
        module.forward = lambda x, plain=plain: (seen.append(x.shape[-2]), plain(x))[1]  # type: ignore[func-returns-value]
    Recompute(model, structure.blocks)
    want = gradients(model)
    assert sum(seen) == 4 * TOKENS  # two blocks, forward and again
    seen.clear()
    ChunkedMLP(model, structure, 5)
    seen.clear()
    assert gap(gradients(model), want) < 1e-12
    assert sum(seen) == 4 * TOKENS


def test_masks_of_dropout_are_those_of_the_whole() -> None:
    model = model_of()
    lora = LoRA(model, Spec(r=2, dropout=0.3))
    with torch.no_grad():
        for p in lora.parameters():
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).sin().view_as(p) * 0.1)
    want = gradients(model, 2)
    ChunkedMLP(model, read_structure(model), 5)
    assert gap(gradients(model, 2), want) < 1e-12
    seen = []
    with declared_position(1, 2):
        chunked(lambda x: (seen.append(position()), x)[1], torch.zeros(2, 3, 4), [], 4)  # type: ignore[func-returns-value]
    assert [(p.tokens, p.token) for p in seen if p is not None] == [(3, 0), (3, 4)]


def test_insides_are_one_chunk_wide_whatever_the_sequence() -> None:
    """Live bytes beyond inputs and outputs do not depend on the number of tokens."""
    inner, width, chunk = 256, 16, 32
    mlp = model_of(width=width, inner=inner, dtype=torch.float32).get_submodule("model.layers.0.mlp")
    inside = []
    for tokens in (256, 1024):
        x = torch.zeros(1, tokens, width, requires_grad=True)
        y, forward = witness(lambda x=x: chunked(mlp, x, chunk=chunk))
        _, backward = witness(lambda y=y: y.sum().backward())
        outside = tokens * width * 4
        inside.append((forward.peak - outside, backward.peak - outside))  # the sum's gradient is one number
        assert forward.held == outside  # only the result: the input was there
    assert inside[0][0] == inside[1][0]
    assert abs(inside[0][1] - inside[1][1]) < 1024


def test_no_gradients_no_graph() -> None:
    model = model_of()
    with torch.no_grad():
        want = loss_of(model, 2)
        ChunkedMLP(model, read_structure(model), 5)
        assert torch.allclose(loss_of(model, 2), want, rtol=1e-12)


class Mixing(nn.Module):
    """Each token sees the ones before it."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.up_proj = nn.Linear(32, 32, dtype=torch.float64)
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up_proj(x.cumsum(1))
        return y


def test_modules_that_mix_tokens_are_refused() -> None:
    model = model_of()
    structure = read_structure(model)
    for block in structure.blocks:
        model.get_submodule(block).mlp = Mixing(nn.Identity())
    with pytest.raises(ConflictError, match="mixes tokens"):
        ChunkedMLP(model, structure, 5)


def test_blocks_without_an_mlp_module_are_refused() -> None:
    model = model_of("opt")
    with pytest.raises(ConflictError, match=r"(?s)no MLP modules.*the block's own"):
        ChunkedMLP(model, read_structure(model), 5)
    assert not has_mlp({"model_type": "opt"})
    structure = replace(read_structure(model_of()), roles={"up": ("mlp.experts.0.up_proj", "mlp.experts.1.up_proj")})
    with pytest.raises(ConflictError, match="2 MLP modules"):
        ChunkedMLP(model_of(), structure, 5)
    assert not has_mlp({"num_local_experts": 8})
    assert has_mlp({"model_type": "llama"})


def test_an_mlp_that_is_run_whole_is_seen() -> None:
    model = model_of()
    mlps = ChunkedMLP(model, read_structure(model), 5)
    gradients(model)
    mlps.assert_effect(1)
    with pytest.raises(EffectError, match="ran 1 of 2 times"):
        mlps.assert_effect(2)
    mlps.chunk = 4
    with pytest.raises(EffectError, match="over 5 tokens at once"):
        mlps.assert_effect(1)
