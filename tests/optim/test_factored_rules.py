"""Adafactor, CAME and Adam-mini against their definitions in float64, other libraries, and their promises."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from skimp.core.errors import SkimpError
from skimp.core.memory.oracle import witness
from skimp.core.workspace import workspace_bytes
from skimp.optim import CAME, Adafactor, AdamMini, role_groups, roles

SHAPES = [(301, 257), (70001,), (1, 5000), (5000, 1), (3, 5, 7), (1,)]
LR, DECAY = 1e-2, 0.1


def gradients(shape: Sequence[int], count: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(count)]


def start(shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def product(rows: Tensor, columns: Tensor) -> Tensor:
    return rows[:, None] * columns[None] / rows.mean()


def adafactor(p: Tensor, grads: list[Tensor], momentum: float, relative: bool) -> Tensor:
    """The definition, dense."""
    shape, flat = p.shape, p.ndim < 2
    p = p.reshape(-1, 1) if flat else p.reshape(-1, p.shape[-1])
    rows, columns, m = torch.zeros(len(p)).double(), torch.zeros(p.shape[1]).double(), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        beta, g = 1 - t**-0.8, g.reshape(p.shape)
        squares = g * g + 1e-30
        rows = beta * rows + (1 - beta) * squares.mean(1)
        columns = beta * columns + (1 - beta) * squares.mean(0)
        u = g / (rows[:, None] if flat else product(rows, columns)).sqrt()
        u = u / max(1.0, float(u.square().mean().sqrt()))
        m = momentum * m + (1 - momentum) * u
        size = LR * max(1e-3, float(p.square().mean().sqrt())) if relative else LR
        p = p * (1 - LR * DECAY) - size * (m if momentum else u)
    return p.reshape(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("momentum", "relative"), [(0.0, False), (0.9, True)])
def test_adafactor_is_its_definition_in_float64(shape: tuple[int, ...], momentum: float, relative: bool) -> None:
    p = nn.Parameter(start(shape))
    rule = Adafactor([("w", p)], lr=LR, weight_decay=DECAY, momentum=momentum, relative=relative)
    for g in gradients(shape):
        rule.step_parameter(p, g)
    torch.testing.assert_close(
        p.detach(), adafactor(start(shape), gradients(shape), momentum, relative), rtol=1e-13, atol=1e-13
    )


def test_adafactor_keeps_v_itself_where_every_square_is_a_multiple_of_one_product() -> None:
    """g_t² = c_t·u·vᵀ: the elementwise moving mean with the same β is reproduced."""
    u, v = start((40,)).abs() + 0.1, start((30,)).abs() + 0.1
    p = nn.Parameter(start((40, 30)))
    rule = Adafactor([("w", p)], lr=LR)
    dense = torch.zeros(40, 30).double()
    for t, c in enumerate((1.0, 7.0, 0.01, 3.0), 1):
        grad = (c * u[:, None] * v[None]).sqrt()
        rule.step_parameter(p, grad)
        beta = 1 - t**-0.8
        dense = beta * dense + (1 - beta) * grad.square()
    state = rule.state[p]
    torch.testing.assert_close(product(state["rows"], state["columns"]), dense, rtol=1e-12, atol=0.0)


def test_adafactor_against_torch() -> None:
    """torch scales by the weights (our `relative`), caps the rate at 1/√t (0.01 is below it here), and floors V̂ at eps²
    where we add 1e-30 to g²: equal to rounding while no gradient is near 0."""
    theirs, ours = nn.Parameter(start((37, 21)).float()), nn.Parameter(start((37, 21)).float())
    torchs = torch.optim.Adafactor([theirs], lr=LR, eps=(1e-30, 1e-3), weight_decay=DECAY)
    rule = Adafactor([("w", ours)], lr=LR, relative=True, weight_decay=DECAY)
    for g in gradients((37, 21), 8, torch.float32):
        theirs.grad = g.clone()
        torchs.step()
        rule.step_parameter(ours, g)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


def came(p: Tensor, grads: list[Tensor], betas: tuple[float, float, float]) -> Tensor:
    shape, flat = p.shape, p.ndim < 2
    p = p.reshape(-1, 1) if flat else p.reshape(-1, p.shape[-1])
    rows, columns = torch.zeros(len(p)).double(), torch.zeros(p.shape[1]).double()
    rows3, columns3, m = rows, columns, torch.zeros_like(p)
    for g in grads:
        squares = g.reshape(p.shape) ** 2 + 1e-30
        rows = betas[1] * rows + (1 - betas[1]) * squares.mean(1)
        columns = betas[1] * columns + (1 - betas[1]) * squares.mean(0)
        u = g.reshape(p.shape) / (rows[:, None] if flat else product(rows, columns)).sqrt()
        u = u / max(1.0, float(u.square().mean().sqrt()))
        m = betas[0] * m + (1 - betas[0]) * u
        unsure = (u - m) ** 2 + 1e-16
        rows3 = betas[2] * rows3 + (1 - betas[2]) * unsure.mean(1)
        columns3 = betas[2] * columns3 + (1 - betas[2]) * unsure.mean(0)
        p = p * (1 - LR * DECAY) - LR * (m if flat else m / product(rows3, columns3).sqrt())
    return p.reshape(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_came_is_its_definition_in_float64(shape: tuple[int, ...]) -> None:
    betas = (0.9, 0.99, 0.999)
    p = nn.Parameter(start(shape))
    rule = CAME([("w", p)], lr=LR, betas=betas, weight_decay=DECAY)
    for g in gradients(shape):
        rule.step_parameter(p, g)
    torch.testing.assert_close(p.detach(), came(start(shape), gradients(shape), betas), rtol=1e-12, atol=1e-12)


def adam(p: Tensor, grads: list[Tensor], average: object) -> Tensor:
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * average(g * g)  # type: ignore[operator]
        p = p * (1 - LR * DECAY) - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
    return p


def blocks_of(block: int) -> object:
    return lambda x: x.reshape(-1, block).mean(1, keepdim=True).expand(-1, block).reshape(x.shape)


@pytest.mark.parametrize(
    ("shape", "role", "name", "average"),
    [
        ((64, 40), ("q", False, 16), "w", blocks_of(16 * 40)),
        ((32, 41), ("k", False, 16), "w", blocks_of(16 * 41)),
        ((64, 41), ("v", False, 16), "w", blocks_of(41)),
        ((40, 120), ("qkv", True, 0), "w", lambda x: x.mean(0, keepdim=True).expand_as(x)),
        ((77,), ("vector", False, 0), "norm.weight", blocks_of(77)),
        ((77,), ("vector", False, 0), "norm.bias", blocks_of(1)),
        ((131, 600), ("embedding", False, 0), "w", blocks_of(600)),
    ],
)
def test_adam_mini_is_adam_with_a_moment_a_block(
    shape: tuple[int, ...], role: tuple, name: str, average: object
) -> None:
    p = nn.Parameter(start(shape))
    group = dict(zip(("role", "columns", "head_dim"), role, strict=True))
    rule = AdamMini([{"params": [(name, p)], **group}], lr=LR, betas=(0.9, 0.99), weight_decay=DECAY)
    for g in gradients(shape):
        rule.step_parameter(p, g)
    torch.testing.assert_close(p.detach(), adam(start(shape), gradients(shape), average), rtol=1e-13, atol=1e-13)


def test_adam_mini_with_blocks_of_one_is_torchs_adamw() -> None:
    ours, theirs = nn.Parameter(start((501,))), nn.Parameter(start((501,)))
    rule = AdamMini(
        [{"params": [("bias", ours)], "role": "vector", "columns": False, "head_dim": 0}], lr=LR, weight_decay=DECAY
    )
    torchs = torch.optim.AdamW([theirs], lr=LR, weight_decay=DECAY)
    for g in gradients((501,), 8):
        theirs.grad = g.clone()
        torchs.step()
        rule.step_parameter(ours, g)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_adam_mini_finds_heads_and_rows_where_heads_share_keys() -> None:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=104,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    rule = AdamMini(role_groups(model.named_parameters(), DECAY, roles(model)))
    rule.init_states()
    found = {name.split(".")[-2]: tuple(t.shape) for name, key, t in rule.named_state() if key == "v"}
    assert found == {
        "embed_tokens": (97,), "q_proj": (4,), "k_proj": (2,), "v_proj": (24,), "o_proj": (48,), "gate_proj": (104,),
        "up_proj": (104,), "down_proj": (48,), "input_layernorm": (1,), "post_attention_layernorm": (1,), "norm": (1,),
    }  # fmt: skip
    numbers = sum(p.numel() for p in model.parameters()) + sum(math.prod(s) for s in found.values())
    assert sum(row.state_bytes for row in rule.table()) == 4 * numbers


def test_adam_mini_takes_columns_of_gpt2() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=48, n_layer=1, n_head=4, n_positions=32))
    rule = AdamMini(role_groups(model.named_parameters(), DECAY, roles(model)))
    rule.init_states()
    found = {name: tuple(t.shape) for name, key, t in rule.named_state() if key == "v"}
    assert found["transformer.h.0.attn.c_attn.weight"] == (144,)
    assert found["transformer.h.0.attn.c_attn.bias"] == (144,)
    assert found["transformer.h.0.mlp.c_proj.weight"] == (48,)
    assert found["transformer.wpe.weight"] == (32,)


def test_adam_mini_refuses_guesses_and_heads_that_do_not_divide() -> None:
    p = nn.Parameter(torch.zeros(50, 40))
    with pytest.raises(SkimpError, match="a group without a role"):
        AdamMini([("w", p)])
    with pytest.raises(SkimpError, match="50 rows for heads of 16"):
        AdamMini([{"params": [("w", p)], "role": "q", "columns": False, "head_dim": 16}])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(301, 257), (70000,), (1, 5000)])
def test_workspace_of_row_wise_rules_is_what_is_allocated(
    shape: tuple[int, ...], dtype: torch.dtype, threads: int
) -> None:
    role = {"role": "vector" if len(shape) < 2 else "o", "columns": False, "head_dim": 0}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        rules = [(Adafactor, {"momentum": 0.9, "relative": True}), (Adafactor, {}), (CAME, {}), (AdamMini, {})]
        for cls, options in rules:
            p = nn.Parameter(torch.randn(shape).to(dtype))
            rule = cls([{"params": [("w", p)], **role}], **options)
            rule.init_states()
            grad = torch.randn(shape).to(dtype)
            block = rule.block_of(p)
            name = {"adafactor": "adafactor", "came": "came", "adam-mini": "adam_mini"}[rule.rule]
            found = witness(lambda rule=rule, p=p, grad=grad: rule.step_parameter(p, grad))[1]
            fifth = options.get("relative", False) if name == "adafactor" else block
            assert found.peak == workspace_bytes(f"skimp::{name}", (p, grad, None, None, fifth)), rule.rule
    finally:
        torch.set_num_threads(before)
