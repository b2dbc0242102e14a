"""Muon: singular values, equivariances, stacks, parts, sizes, and torch's own as a second oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from skimp.core.errors import SkimpError
from skimp.core.memory.oracle import witness
from skimp.core.newton_schulz import newton_schulz
from skimp.core.workspace import workspace_bytes
from skimp.optim import Muon, role_groups, roles
from skimp.optim.muon_step import parts_of

HIDDEN = {"role": "up", "columns": False, "head_dim": 0}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spectrum(values: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix with these singular values."""
    u, _ = torch.linalg.qr(random(rows, len(values), seed=seed, dtype=torch.float64))
    v, _ = torch.linalg.qr(random(columns, len(values), seed=seed + 1, dtype=torch.float64))
    return (u * values) @ v.mT


@pytest.mark.parametrize("shape", [(40, 40), (24, 70), (70, 24), (33, 57)])
def test_singular_values_above_3e_3_of_the_norm_land_near_one_with_the_same_vectors(shape: tuple[int, int]) -> None:
    short = min(shape)
    values = torch.logspace(0, math.log10(4e-3), short, dtype=torch.float64)
    m = spectrum(values / values.norm(), *shape)
    out = newton_schulz(m.float()).double()
    u, _, vt = torch.linalg.svd(m, full_matrices=False)
    inside = u.mT @ out @ vt.mT
    found = inside.diagonal()
    assert 0.68 <= found.min() < found.max() <= 1.21
    assert (inside - found.diag()).abs().max() < 2e-5  # the same singular vectors


def test_weak_directions_come_up_to_two_fifths() -> None:
    values = torch.logspace(0, -2.7, 24, dtype=torch.float64)
    out = newton_schulz(spectrum(values / values.norm(), 24, 60).float())
    assert torch.linalg.svdvals(out).min() >= 0.4


@pytest.mark.parametrize("shape", [(24, 70), (70, 24), (40, 40)])
def test_transposing_and_scaling_commute_with_it(shape: tuple[int, int]) -> None:
    m = random(*shape)
    out = newton_schulz(m)
    turned = newton_schulz(m.mT.contiguous()).mT
    assert torch.equal(turned, out) if shape[0] != shape[1] else torch.allclose(turned, out, atol=1e-5)
    for c in (2.0**-8, 1e-3, 1e3):
        torch.testing.assert_close(newton_schulz(c * m), out, rtol=0.0, atol=1e-4 if c < 1 else 4e-6)
    assert torch.equal(newton_schulz(torch.zeros(shape)), torch.zeros(shape))


def test_a_stack_is_its_matrices_bit_for_bit() -> None:
    m = random(5, 3, 24, 50)
    one_by_one = torch.stack([torch.stack([newton_schulz(x) for x in row]) for row in m])
    assert torch.equal(newton_schulz(m), one_by_one)


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (64, 1024)])
def test_an_update_has_about_the_size_of_adamws(shape: tuple[int, int]) -> None:
    p = nn.Parameter(torch.zeros(shape))
    Muon([{"params": [("w", p)], **HIDDEN}], lr=1.0).step_parameter(p, random(*shape))
    assert 0.13 < float(p.detach().square().mean().sqrt()) < 0.25


def test_the_rule_step_by_step_in_float64() -> None:
    p = nn.Parameter(random(30, 44, dtype=torch.float64))
    rule = Muon([{"params": [("w", p)], **HIDDEN}], lr=1e-2, weight_decay=0.1)
    q, m = p.detach().clone(), torch.zeros(30, 44).double()
    for step in range(4):
        g = random(30, 44, seed=step + 1, dtype=torch.float64)
        rule.step_parameter(p, g)
        m = 0.95 * m + g
        q = q * (1 - 1e-2 * 0.1) - 1e-2 * 0.2 * math.sqrt(44) * newton_schulz(g + 0.95 * m)
    torch.testing.assert_close(p.detach(), q, rtol=1e-12, atol=1e-13)


def test_sum_and_average_momentum_give_the_same_direction() -> None:
    """(1 − μ)·(G + μ·M) and the average form differ by a factor, which is divided out."""
    m, average = torch.zeros(24, 40), torch.zeros(24, 40)
    for step in range(6):
        g = random(24, 40, seed=step)
        m, average = 0.95 * m + g, 0.95 * average + 0.05 * g
        ours, theirs = newton_schulz(g + 0.95 * m), newton_schulz(0.05 * g + 0.95 * average)
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=5e-5)


@pytest.mark.parametrize("shape", [(48, 104), (104, 48), (64, 64)])
@pytest.mark.parametrize(("scale", "theirs"), [("match-rms", "match_rms_adamw"), ("spectral", "original")])
def test_against_torch_which_orthogonalises_in_bfloat16(shape: tuple[int, int], scale: str, theirs: str) -> None:
    """torch rounds every product to 8 bits and keeps averages instead of sums, hence 2 % of an update."""
    a, b = nn.Parameter(random(*shape)), nn.Parameter(random(*shape))
    ours = Muon([{"params": [("w", a)], **HIDDEN}], lr=1e-2, weight_decay=0.1, scale=scale)
    torchs = torch.optim.Muon([b], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn=theirs)
    for step in range(5):
        g = random(*shape, seed=step + 1)
        before = b.detach().clone()
        ours.step_parameter(a, g)
        b.grad = g
        torchs.step()
    moved = (b.detach() - before).norm()
    assert (a - b).detach().norm() < 0.1 * moved  # five steps of 2 %


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=104,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def test_routes_and_bytes_of_a_model_with_a_tied_embedding() -> None:
    model = llama()
    rule = Muon(role_groups(model.named_parameters(), 0.1, roles(model)))
    rule.init_states()
    rows = {row.parameter: row for row in rule.table()}
    assert len(rows) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        hidden = "proj" in name
        assert rows[name].rule == ("muon" if hidden else "muon (adamw)")
        assert rows[name].state_bytes == (4 if hidden else 8) * p.numel()
    assert rows["model.embed_tokens.weight"].weight_decay == 0.1
    assert "lm_head.weight" not in rows


def test_what_is_not_hidden_is_adamw() -> None:
    model, other = llama(), llama()
    rule = Muon(role_groups(model.named_parameters(), 0.1, roles(model)), lr=1e-3, betas=(0.9, 0.999))
    table, theirs = model.model.embed_tokens.weight, other.model.embed_tokens.weight
    adamw = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.1)
    for step in range(50):
        theirs.grad = random(*theirs.shape, seed=step)
        adamw.step()
        rule.step_parameter(table, random(*theirs.shape, seed=step))
    torch.testing.assert_close(table, theirs, rtol=1e-6, atol=1e-6)


def test_stacks_and_single_steps_are_equal_to_the_bit() -> None:
    def trained(stacked: bool) -> list[Tensor]:
        model = llama()
        rule = Muon(role_groups(model.named_parameters(), 0.1, roles(model)), lr=1e-2)
        for step in range(3):
            for i, p in enumerate(model.parameters()):
                p.grad = random(*p.shape, seed=100 * step + i)
            if stacked:
                rule.step()
            else:
                for p in model.parameters():
                    rule.step_parameter(p)
        return [p.detach() for p in model.parameters()]

    model = llama()
    rule = Muon(role_groups(model.named_parameters(), 0.1, roles(model)))
    assert max(len(batch) for batch in rule.together(list(model.parameters()))) == 4  # gate and up are of two groups
    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_a_fused_projection_is_three_matrices() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=48, n_layer=1, n_head=4, n_positions=32))
    rule = Muon(role_groups(model.named_parameters(), 0.0, roles(model)), lr=1.0)
    p = model.transformer.h[0].attn.c_attn.weight
    assert parts_of(p.shape, rule.group_of(p)) == (3, True)
    g, before = random(48, 144), p.detach().clone()
    rule.step_parameter(p, g)
    expected = torch.cat([newton_schulz(1.95 * part) for part in g.chunk(3, 1)], 1) * 0.2 * math.sqrt(48)
    torch.testing.assert_close(before - p.detach(), expected, rtol=1e-4, atol=1e-5)


def test_more_than_two_dimensions_are_matrices_of_the_last_two() -> None:
    p = nn.Parameter(torch.zeros(3, 20, 30))
    Muon([{"params": [("w", p)], **HIDDEN}], lr=1.0).step_parameter(p, random(3, 20, 30))
    expected = -0.2 * math.sqrt(30) * newton_schulz(1.95 * random(3, 20, 30))
    torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)


def test_no_role_is_refused() -> None:
    with pytest.raises(SkimpError, match="a group without a role"):
        Muon([("w", nn.Parameter(torch.zeros(4, 4)))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "role", "columns"),
    [((48, 144), "qkv", True), ((96, 41), "o", False), ((3, 20, 30), "matrix", False), ((130, 600), "up", False)],
)
def test_workspace_is_what_is_allocated(shape: tuple[int, ...], role: str, columns: bool, dtype: torch.dtype) -> None:
    ps = [nn.Parameter(random(*shape, dtype=dtype)) for _ in range(3)]
    named = [(str(i), p) for i, p in enumerate(ps)]
    rule = Muon([{"params": named, "role": role, "columns": columns, "head_dim": 0}])
    rule.init_states()
    for i, p in enumerate(ps):
        p.grad = random(*shape, seed=i, dtype=dtype)
    parts, by_columns = parts_of(shape, rule.param_groups[0])
    arguments = (ps, [], [], [], parts, by_columns)
    assert witness(rule.step)[1].peak == workspace_bytes("skimp::muon", arguments)
