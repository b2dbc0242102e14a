"""Offload of activations: the same bits for fewer bytes, alone and with recompute, accumulation, tied weights."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.activations.offload import Offload, choose
from skimp.activations.recompute import Recompute
from skimp.core.disk import DiskTier
from skimp.core.errors import EffectError
from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker
from skimp.core.tiers import SimulatedDisk

COUNT, WIDTH = 5, 64


class Block(nn.Module):
    """Views, an in-place operator, a mask of booleans and a tensor that is kept twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        q, k, v = self.up(x).chunk(3, -1)
        mixed = torch.where(q > 0, q * k, v.sigmoid())
        mixed = mixed.tanh().clamp_max(0.9)
        mixed += x.detach()
        return 0.5 * x + self.down(mixed * mixed) * scale


def net(tied: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    made = nn.Sequential(*(Block(WIDTH) for _ in range(COUNT))).train()
    if tied:
        made[4].down.weight = made[1].down.weight
    return made


def rows(seed: int = 0) -> Tensor:
    return torch.randn(2, 37, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    for x in inputs:
        x.grad = None
        model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [
        x.grad.clone() for x in inputs if x.grad is not None
    ]


NAMES = [str(i) for i in range(COUNT)]


@pytest.mark.parametrize("chosen", [(), (0,), (4,), (0, 1, 2, 3), (0, 1, 2, 3, 4), (1, 3), (0, 2, 3)])
@pytest.mark.parametrize("recomputed", [(), (0, 1), (0, 1, 2, 3, 4)])
def test_gradients_are_the_same_to_the_bit(
    tmp_path: Path, chosen: tuple[int, ...], recomputed: tuple[int, ...]
) -> None:
    model = net(tied=True)
    plain = gradients(model, rows(), rows(1))
    again = Recompute(model, [NAMES[i] for i in recomputed])
    away = Offload(model, NAMES, chosen, DiskTier(tmp_path), least=1)
    for _ in range(2):
        found = gradients(model, rows(), rows(1))
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert away.tier.used == 0
    if chosen:
        away.assert_effect(4)
    away.remove()
    again.remove()
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, rows(), rows(1)), strict=True))


def test_only_two_blocks_are_in_memory_at_a_time(tmp_path: Path) -> None:
    """What a block keeps is dead when the block after the next one begins, and its file space when backward is over."""
    model, alive = net(), []

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        alive.append(sum(ref() is not None for ref in kept))

    kept: list[weakref.ref[Any]] = []
    for block in model:
        block.up.register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out.untyped_storage())))
        block.register_forward_hook(watch)
    away = Offload(model, NAMES, range(COUNT - 1), DiskTier(tmp_path), least=1)
    out = model(rows())
    # After each block, before its boundary: its own and that of the block before it.
    assert max(alive) <= 2
    assert sum(ref() is not None for ref in kept) == 1, "the last block keeps its own"
    out.sum().backward()
    del out
    assert away.tier.used == 0
    away.remove()


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def tracked(model: nn.Module, x: Tensor) -> int:
    """Peak bytes above what was there before."""
    model.zero_grad()
    x.grad = None
    tracker = Tracker()
    tracker.hold([*model.parameters(), x], "weights")
    rest = tracker.live
    with tracker:
        step(model, x)
    return tracker.peak.total - rest


def test_peak_falls_to_two_blocks_and_is_what_the_allocator_saw(tmp_path: Path) -> None:
    model, x = net(), rows()
    full = tracked(model, x)
    away = Offload(model, NAMES, range(COUNT), DiskTier(tmp_path), least=1)
    found = tracked(model, x)
    model.zero_grad()
    x.grad = None
    _, seen = witness(lambda: step(model, x))
    assert found == seen.peak
    assert found < 0.75 * full
    away.remove()


def test_a_simulated_tier_takes_the_same_bytes_and_room(tmp_path: Path) -> None:
    model, x = net(), rows()
    found = []
    for tier in (DiskTier(tmp_path), SimulatedDisk()):
        away = Offload(model, NAMES, range(COUNT), tier, least=1)
        found.append((tracked(model, x), tier.peak, tier.size, tier.written, tier.fetched))
        away.remove()
    assert found[0] == found[1]


def test_evaluation_moves_nothing(tmp_path: Path) -> None:
    model = net()
    away = Offload(model, NAMES, range(COUNT), DiskTier(tmp_path), least=1)
    with torch.no_grad():
        model(rows())
    model.eval()
    model(rows()).sum().backward()
    assert away.saved.stored == 0
    away.remove()


def test_a_step_after_one_that_broke_off(tmp_path: Path) -> None:
    model = net()
    plain = gradients(model, rows())
    away = Offload(model, NAMES, range(COUNT), DiskTier(tmp_path), least=1)

    def breaks(*_: object) -> None:
        raise ValueError("in the middle")

    hook = model[3].register_forward_pre_hook(breaks)
    with pytest.raises(ValueError, match="in the middle"):
        model(rows())
    hook.remove()
    hook = model[1].down.register_full_backward_pre_hook(breaks)
    with pytest.raises(ValueError, match="in the middle"):
        model(rows()).sum().backward()
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, rows()), strict=True))
    assert away.tier.used == 0
    away.remove()


def test_blocks_that_move_nothing_fail_the_effect(tmp_path: Path) -> None:
    model = net()
    away = Offload(model, NAMES, range(COUNT), DiskTier(tmp_path), least=10**9)
    gradients(model, rows())
    with pytest.raises(EffectError, match="offload of 5 blocks to disk"):
        away.assert_effect(1)
    away.remove()


def test_the_first_blocks_move() -> None:
    assert choose(2, 5) == (0, 1)
    assert choose(9, 3) == (0, 1, 2)
