"""Inner rules are the plain rules: a move of zeros without decay is what the plain rule does to a weight of zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core.errors import SkimpError
from skimp.optim import Adafactor, Lion, Muon
from skimp.optim.inner import Adam
from skimp.optim.inner_rules import NAMES, inner_of
from skimp.optim.presets import GaLore

SHAPE = (24, 40)
PLAIN: dict[str, Callable[[Any], Any]] = {
    "lion": lambda group: Lion([group], lr=1e-2, weight_decay=0.0),
    "adafactor": lambda group: Adafactor([group], lr=1e-2),
    "muon": lambda group: Muon([group], lr=1e-2, weight_decay=0.0),
}


def gradient(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.parametrize("name", PLAIN)
def test_moves_add_up_to_the_plain_rule_s_weights(name: str) -> None:
    inner = inner_of(name)
    state: dict[str, Any] = {
        key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in inner.state_spec(SHAPE, torch.float64).items()
    }
    p = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
    rule = PLAIN[name]({"params": [("w", p)], "role": "up", "columns": False, "head_dim": 0})
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for step in range(1, 6):
        g = gradient(step)
        kept = g.clone()
        total += inner.move(g, state, 1e-2, step, {"betas": (0.9, 0.99)}, "w")
        assert torch.equal(g, kept)
        rule.step_parameter(p, g)
    torch.testing.assert_close(total, p.detach(), rtol=1e-10, atol=1e-12)
    assert {key: value.shape for key, value in state.items()} == {
        key: value.shape for key, value in rule.state[p].items() if torch.is_tensor(value)
    }


def test_names_and_refusals() -> None:
    assert inner_of("adam", "int8") == Adam("int8")
    assert {inner_of(name).__class__.__name__ for name in NAMES} == {"Adam", "Sign", "Factored", "Orthogonal"}
    with pytest.raises(SkimpError, match="an inner rule"):
        inner_of("sgd")
    with pytest.raises(SkimpError, match="lion' with int8"):
        inner_of("lion", "int8")


@pytest.mark.parametrize("inner", NAMES)
def test_galore_runs_on_every_inner_rule_and_resumes(inner: str) -> None:
    def make() -> tuple[nn.Parameter, GaLore]:
        p = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        return p, GaLore([("w", p)], lr=1e-2, rank=6, refresh=3, inner=inner, stagger=False)

    def run(p: nn.Parameter, rule: GaLore, first: int, last: int) -> None:
        for step in range(first, last):
            rule.step_parameter(p, gradient(step))

    p, rule = make()
    before = p.detach().clone()
    run(p, rule, 0, 2)
    assert torch.linalg.matrix_rank(p.detach() - before, rtol=1e-9) <= 6  # one basis of six directions
    run(p, rule, 2, 8)
    q, first = make()
    run(q, first, 0, 4)
    r, second = make()
    r.data.copy_(q.data)
    second.load_state_dict(first.state_dict())
    run(r, second, 4, 8)
    assert torch.equal(p, r)
    assert not torch.equal(p, before)


def test_only_adam_s_moments_are_turned() -> None:
    with pytest.raises(SkimpError, match="rotate with an inner rule of states m"):
        GaLore([("w", nn.Parameter(torch.zeros(SHAPE)))], rank=6, inner="lion", policy="rotate")
