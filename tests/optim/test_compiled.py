"""`torch.compile` of update rules: the compiler fuses the element-wise arithmetic, to the values of eager mode."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.optim import AdamW, AdamW8bit
from skimp.optim.inner import Adam
from skimp.optim.presets import GaLore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's CPU back end needs g++"),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 5


def gradient(shape: torch.Size, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def ends(make: Any, compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    ps = [nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40))]
    rule = make(ps)
    step = torch.compile(rule.step) if compiled else rule.step
    for i in range(STEPS):
        for p in ps:
            p.grad = gradient(p.shape, i)
        step()
    return [p.detach().clone() for p in ps]


@pytest.mark.parametrize(
    ("make", "breaks"),
    [
        (lambda ps: AdamW(ps, lr=1e-2, weight_decay=0.1), 0),
        (lambda ps: AdamW8bit(ps, lr=1e-2), None),
        (lambda ps: GaLore(ps, lr=1e-2, rank=4, refresh=2, stagger=False), None),
    ],
    ids=["adamw", "adamw8bit", "galore"],
)
def test_a_compiled_step_equals_an_eager_one(make: Any, breaks: int | None) -> None:
    """AdamW is one graph; where a rule reads a value (a new basis) or calls an operator of its own the graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found, expected = ends(make, True), ends(make, False)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    if breaks is not None:
        assert sum(torch._dynamo.utils.counters["graph_break"].values()) == breaks


def test_the_inner_rule_compiles_as_one_graph() -> None:
    """What a projected rule does between its two products."""
    torch._dynamo.reset()
    moves = []
    for compiled in (True, False):
        rule = Adam()
        state = {
            k: torch.zeros(size, dtype=kind) for k, (size, kind) in rule.state_spec((4, 40), torch.float32).items()
        }
        move = torch.compile(rule.move, fullgraph=True) if compiled else rule.move
        group = {"betas": (0.9, 0.999), "eps": 1e-8}
        shape = torch.Size((4, 40))
        moves.append([move(gradient(shape, i), state, 1e-2, i, group, "w").clone() for i in range(1, STEPS)])
    for a, b in zip(*moves, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
