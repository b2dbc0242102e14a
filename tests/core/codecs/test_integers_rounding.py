"""Integer codes that move: the mean is right, small moves add up, and a grid stays while its numbers lie on it."""

from __future__ import annotations

from math import floor
from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.core.codecs import Int4, Int8, integers_rounding
from skimp.core.codecs.integers_rounding import round_into
from skimp.core.noise import uniform

CODECS = pytest.mark.parametrize(
    "codec", [Int8(16), Int8(16, symmetric=False), Int4(8), Int4(8, symmetric=False)], ids=str
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coded(codec: Any, x: Tensor) -> dict[str, Tensor]:
    """Codes of `x` on a grid with room, as an update leaves them."""
    parts: dict[str, Tensor] = codec.encode(torch.zeros_like(x))
    round_into(codec, parts, x, 5, "start")
    return parts


def copied(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: part.clone() for key, part in parts.items()}


def steps(codec: Any, parts: dict[str, Tensor], x: Tensor) -> Tensor:
    """The step between levels at every number of `x`."""
    return parts["scale"].repeat_interleave(codec.group, 1)[:, : x.shape[1]].double()


@CODECS
@pytest.mark.parametrize("shape", [(3, 32), (5, 37), (1, 1)])
def test_every_number_is_one_of_its_two_neighbours_and_the_mean_is_right(codec: Any, shape: tuple[int, int]) -> None:
    """Five standard errors over 400 draws; a biased rounding (to nearest: up to half a step) is 20 of them off."""
    x = normal(*shape, seed=1)
    held = coded(codec, x)
    moved = x + 0.3 * steps(codec, held, x) * normal(*shape, seed=2).tanh()
    total, draws = torch.zeros_like(x), 400
    for stream in range(draws):
        parts = copied(held)
        round_into(codec, parts, moved, 0, "w", stream=stream)
        assert torch.equal(parts["scale"], held["scale"])
        got = codec.decode(parts, shape, torch.float64)
        assert ((got - moved).abs() <= steps(codec, parts, x) * (1 + 1e-6)).all()
        total += got
    error = (total / draws - moved).abs() / steps(codec, held, x)
    assert (error <= 5 * 0.5 / draws**0.5).all()


@CODECS
def test_codes_are_those_of_a_plain_loop(codec: Any) -> None:
    """floor, and one more where the noise is below the remainder; with the grid's own numbers, in float32."""
    x = normal(5, 21, seed=3)
    parts = coded(codec, x)
    moved = (x + 0.2 * steps(codec, parts, x)).float()
    round_into(codec, parts, moved, 7, "name", stream=9)
    rows, groups = parts["scale"].shape
    noise = uniform(7, "name", 0, rows * groups * codec.group, stream=9)
    expected = torch.empty(5, 21)
    for i in range(5):
        for j in range(21):
            scale = parts["scale"][i, j // codec.group]
            v = float(moved[i, j] / scale)
            level = floor(v) + (float(noise[i * groups * codec.group + j]) < v - floor(v))
            expected[i, j] = level * scale
    assert torch.equal(codec.decode(parts, (5, 21), torch.float32), expected)


@CODECS
def test_what_did_not_move_stays_to_the_bit(codec: Any) -> None:
    parts = coded(codec, normal(6, 40, seed=4))
    held = copied(parts)
    seen = codec.decode(parts, (6, 40), torch.float32)
    for stream in range(50):
        round_into(codec, parts, seen, 1, "w", stream=stream)
    assert all(torch.equal(parts[key], held[key]) for key in held)


@pytest.mark.parametrize("codec", [Int8(16), Int8(16, symmetric=False)], ids=str)
def test_moves_below_half_a_step_add_up_and_to_nearest_they_vanish(codec: Any) -> None:
    """100 moves of 1/50 of a step are two steps in the mean; rounded to nearest they are none."""
    x = normal(8, 64, seed=5).clamp(-1, 1)
    x[:, :: codec.group], x[:, 1 :: codec.group] = 1.5, -1.5  # so that no group leaves its grid
    parts = coded(codec, x)
    start = codec.decode(parts, x.shape, torch.float64)
    inside = (start.abs() < 1.2).double()
    move = 0.02 * steps(codec, parts, x) * inside
    nearest = start
    for stream in range(100):
        seen = codec.decode(parts, x.shape, torch.float64)
        round_into(codec, parts, seen + move, 2, "w", stream=stream)
        nearest = torch.round((nearest + move) / steps(codec, parts, x)) * steps(codec, parts, x)
    gone = (codec.decode(parts, x.shape, torch.float64) - start) / steps(codec, parts, x)
    torch.testing.assert_close(nearest, start, rtol=1e-6, atol=1e-9)
    found, count = (gone * inside).sum() / inside.sum(), inside.sum()
    assert abs(found - 2.0) < 5 * (100 * 0.02 * 0.98 / count) ** 0.5


@CODECS
def test_a_grid_is_kept_while_it_fits_and_made_anew_with_room(codec: Any) -> None:
    x = normal(4, 2 * codec.group, seed=6).clamp(-1, 1)
    x[:, 0], x[:, 1] = 1.0, -1.0
    x[:, codec.group], x[:, codec.group + 1] = 1.0, -1.0
    parts = coded(codec, x)
    held = copied(parts)
    for factor, kept in ((1.03, True), (0.6, True), (1.3, False), (0.3, False)):
        parts = copied(held)
        changed = x.clone()
        changed[:, : codec.group] *= factor  # the other group of each row stays
        round_into(codec, parts, changed, 3, "w")
        assert torch.equal(parts["scale"][:, 1], held["scale"][:, 1])
        assert torch.equal(parts["scale"][:, 0], held["scale"][:, 0]) == kept
        error = (codec.decode(parts, x.shape, torch.float64) - changed).abs()
        assert (error <= steps(codec, parts, x) * (1 + 1e-6)).all()
        bits = parts["scale"].view(torch.int32)
        assert ((bits & 0xFF) == 0).all()  # 16 significant bits: level times scale is exact


@CODECS
def test_groups_of_zeros_one_sign_and_not_numbers(codec: Any) -> None:
    x = torch.zeros(1, 4 * codec.group)
    x[:, codec.group : 2 * codec.group] = 0.75
    x[:, 2 * codec.group : 3 * codec.group] = -0.75
    x[:, 3 * codec.group] = float("nan")
    parts = coded(codec, x)
    zero, plus, minus, bad = codec.decode(parts, x.shape, torch.float32).view(4, codec.group)
    assert not zero.any()
    step = parts["scale"][0, 1]
    assert ((plus - 0.75).abs() <= step).all()
    assert ((minus + 0.75).abs() <= step).all()
    assert bad.isnan().all()
    round_into(codec, parts, torch.ones_like(x), 0, "w")  # and back to numbers
    assert ((codec.decode(parts, x.shape, torch.float32) - 1).abs() <= parts["scale"].max()).all()


@CODECS
def test_pieces_and_addresses(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same codes however many rows are coded at once; others for another name, seed or stream."""
    x = normal(9, 40, seed=7)
    held = coded(codec, x)

    def drawn(seed: int = 0, name: str = "a", stream: int = 0) -> Tensor:
        parts = copied(held)
        round_into(codec, parts, x * 0.97, seed, name, stream=stream)
        return parts["codes"]

    whole = drawn()
    others = [drawn(seed=1), drawn(name="b"), drawn(stream=1)]
    assert all(not torch.equal(whole, other) for other in others)
    monkeypatch.setattr(integers_rounding, "PIECE", 2 * held["scale"].shape[1] * codec.group)
    assert torch.equal(drawn(), whole)
