"""Integer codes that move: a matrix rounded at random into codes that are there, on their own grid while it fits.

A weight that trains in b bits moves by less than a step between two levels. Rounded to nearest every such move is
lost; rounded up with probability (x − below) / step the mean is right (Gupta et al., 2015, arXiv 1502.02551, section
3), which is what Q-GaLore trains its int8 weights by (Zhang et al., 2024, arXiv 2407.08296, section 3.4).

A group's grid is made anew only where its numbers have left it, or fill less than half of it. On a new grid at every
step, as in the released code, all numbers of the group would lie between levels and be drawn again, moved or not: a
variance of 1/6 of a squared step each time, where a move of d steps on the old grid has d·(1 − d). A new grid has room
for 1/16 more than its numbers, so that the largest may grow for a while, and a scale of 16 significant bits: multiples
of it by a code are exact in float32, and what did not move is drawn nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from skimp.core.codecs.integers import Integers, packed
from skimp.core.noise import uniform
from skimp.core.repeat import rounds

#: Numbers that are coded at once: 1 MiB in float32, and about four times that on the way.
PIECE = 2**18
#: A new grid reaches further than its numbers by this part; an old one is kept while they fill this part of it.
ROOM, LEAST = 1.0 / 16.0, 0.5


@torch.no_grad()
def round_into(
    codec: Integers, parts: Mapping[str, Tensor], x: Tensor, seed: int, name: str, *, stream: int = 0
) -> None:
    """Write `x` into `parts` of a matrix of its shape, rounded at random; number i of a row-major walk over whole
    groups is drawn with noise number i of (seed, name, stream).

    The mean of what `codec` then decodes is `x`, to the float32 of the arithmetic. A group with a NaN or an infinity
    decodes to NaN.

    Args:
        codec: whose parts they are. parts: as `codec.encode` makes them, of any earlier matrix of that shape.
        x: (rows, columns), floating point; not changed.
    """
    rows, groups = parts["scale"].shape
    width = groups * codec.group
    step = max(1, PIECE // max(1, width))
    for start in rounds(range(0, rows, step)):
        stop = min(start + step, rows)
        values = torch.zeros(stop - start, groups, codec.group, dtype=torch.float32, device=x.device)
        values.view(stop - start, width)[:, : x.shape[1]].copy_(x[start:stop])
        _grid_(codec, values, parts, slice(start, stop))
        noise = uniform(seed, name, start * width, (stop - start) * width, stream=stream, device=x.device)
        _round_(codec, values, noise.view_as(values), parts, slice(start, stop))


def _grid_(codec: Integers, values: Tensor, parts: Mapping[str, Tensor], here: slice) -> None:
    """Keep the scale (and zero point) of every group whose numbers lie well on it; write another for the others."""
    scale, most = parts["scale"][here], 2**codec.bits - 1
    low, high = values.amin(2), values.amax(2)
    if codec.symmetric:
        reach = scale * (2 ** (codec.bits - 1) - 1)
        largest = torch.maximum(high, low.neg_())
        stays = (largest <= reach) & (largest >= reach * LEAST)
        scale.copy_(torch.where(stays, scale, _short(largest * ((1.0 + ROOM) / (most // 2)))))
        return
    zero = parts["zero"][here]
    low, high = low.clamp_max_(0.0), high.clamp_min_(0.0)
    span = high - low
    stays = (low >= scale * -zero) & (high <= scale * (most - zero)) & (span >= scale * (most * LEAST))
    # A zero point is a whole number, upwards: with a level less, and half the room below, both ends are on the grid.
    new = _short(span * ((1.0 + ROOM) / (most - 1)))
    steps = torch.where(new == 0, torch.ones_like(new), new)
    zero.copy_(torch.where(stays, zero, ((span * (ROOM / 2) - low) / steps).ceil_()))
    scale.copy_(torch.where(stays, scale, new))


def _short(scale: Tensor) -> Tensor:
    """The next float32 with 16 significant bits, upwards; NaN and infinity stay."""
    bits = scale.view(torch.int32)
    return bits.add_(0xFF).bitwise_and_(~0xFF).view(torch.float32)


def _round_(codec: Integers, values: Tensor, noise: Tensor, parts: Mapping[str, Tensor], here: slice) -> None:
    scale = parts["scale"][here]
    values.div_(torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(2))
    codes = values.floor()
    codes.add_(values.sub_(codes).sub_(noise).ceil_())  # one more where the noise is below the remainder
    if codec.symmetric:
        half = 2 ** (codec.bits - 1)
        codes.clamp_(1 - half, half - 1).add_(half)  # the ends lie on the grid to an ulp
    else:
        codes.add_(parts["zero"][here].unsqueeze(2)).clamp_(0, 2**codec.bits - 1)
    parts["codes"][here].copy_(packed(codes.view(codes.shape[0], -1), codec.bits))
