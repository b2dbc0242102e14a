"""A part of a parameter is updated as that part of the whole: by the place of its first number."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

from skimp.core.forms import reference_only
from skimp.core.sharded import Part, beside, largest_part, local, part_of, zeros_beside
from skimp.optim import AdamW8bit, AdamWBF16
from skimp.optim.adamw8bit_step import adamw8bit
from skimp.optim.adamw_bf16_step import adamw_bf16

OPTIONS = (1e-2, 0.9, 0.999, 1e-8, 0.1, 3, 77)


@pytest.mark.parametrize("form", [nullcontext, reference_only], ids=["native", "reference"])
@pytest.mark.parametrize("cuts", [(0, 1, 700, 1301), (0, 515, 1301), (0, 2**16 + 3, 2**17 + 9)])
@pytest.mark.parametrize("states", [torch.bfloat16, torch.float32])
def test_parts_of_a_bf16_parameter_round_as_the_whole(form: Any, cuts: tuple[int, ...], states: torch.dtype) -> None:
    n = cuts[-1]
    g = torch.randn(n)
    whole = [torch.randn(n).to(torch.bfloat16), torch.randn(n).to(states), torch.rand(n).to(states)]
    parts = [t.clone() for t in whole]
    with form():
        adamw_bf16(whole[0], g, whole[1], whole[2], *OPTIONS)
        for start, stop in pairwise(cuts):
            here = [t[start:stop] for t in parts]
            adamw_bf16(here[0], g[start:stop], here[1], here[2], *OPTIONS, start)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("form", [nullcontext, reference_only], ids=["native", "reference"])
def test_parts_at_block_borders_equal_the_whole_with_8_bit_states(form: Any) -> None:
    n, cut = 1301, 768
    g = torch.randn(n)
    codes = [torch.randint(0, 256, (n,), dtype=torch.uint8) for _ in range(2)]
    maxima = [torch.rand(6) for _ in range(2)]
    whole = [torch.randn(n).to(torch.bfloat16), codes[0], maxima[0], codes[1], maxima[1]]
    parts = [t.clone() for t in whole]
    with form():
        adamw8bit(whole[0], g, *whole[1:], *OPTIONS)
        for start, stop in ((0, cut), (cut, n)):
            numbers, blocks = slice(start, stop), slice(start // 256, -(-stop // 256))
            p, m, m_max, v, v_max = (t[blocks if t.numel() == 6 else numbers] for t in parts)
            adamw8bit(p, g[numbers], m, m_max, v, v_max, *OPTIONS, start)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_the_whole_decides_what_state_a_part_gets() -> None:
    rule = AdamW8bit([torch.nn.Parameter(torch.zeros(4, 4))])
    assert rule.state_spec((2, 30), torch.float32, whole=4096)["m"] == ((2, 30), torch.uint8)
    assert rule.state_spec((2, 30), torch.float32, whole=4095)["m"] == ((2, 30), torch.float32)
    assert rule.state_spec((2, 30), torch.float32)["m"] == ((2, 30), torch.float32)
    assert rule.state_spec((3, 100), torch.float32, whole=9000)["m_absmax"] == ((2,), torch.float32)


def test_a_plain_tensor_is_its_own_part() -> None:
    p = torch.zeros(3, 5)
    assert local(p) is p
    assert part_of("w", p) == Part("w", 15, 0, "w")
    assert largest_part(p) == (3, 5)
    assert beside((7,), p) == (7,)
    assert zeros_beside((7,), p, torch.float32).shape == (7,)


@pytest.mark.parametrize("make", [AdamW8bit, AdamWBF16])
def test_spec_and_bytes_of_a_plain_parameter(make: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(70, 70, dtype=torch.bfloat16))
    rule = make([("w", p)])
    assert rule.spec_of(p) == rule.state_spec(p.shape, p.dtype)
    assert rule.bytes_of(p) == rule.state_bytes(p.shape, p.dtype)
