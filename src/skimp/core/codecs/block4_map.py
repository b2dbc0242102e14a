"""The two maps of 4-bit blocks, as numpy arrays that are equal on every machine.

Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States", 2023, arXiv 2309.01507, section 3. Signed, for first
moments: the dynamic-exponent map of 8-bit states with three decades: 7 entries of each sign, 0 and +1 (no −1, so the
extreme of a block whose largest number is negative comes back as 0.8875 of it). Unsigned, for second moments: k/16 for
k of 1 to 16. Zero is left out, because a second moment that becomes 0 under a first that does not is a step without
bound.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy

DECADES = 3
#: Numbers that share a maximum.
BLOCK4 = 128


@cache
def codebook4(signed: bool) -> numpy.ndarray[Any, Any]:
    """The 16 sorted float32 entries: decade i of 0…2 scales by 10**(i−2) the midpoints of 2**i parts of [0.1, 1]."""
    if not signed:
        return frozen(numpy.arange(1, 17) / 16)
    entries = [0.0, 1.0]
    for i in range(DECADES):
        edges = [0.1 + 0.9 * k / 2**i for k in range(2**i + 1)]
        middles = [10.0 ** (i - DECADES + 1) * (a + b) / 2 for a, b in pairwise(edges)]
        entries += [*middles, *(-m for m in middles)]
    return frozen(sorted(entries))


@cache
def midpoints4(signed: bool) -> numpy.ndarray[Any, Any]:
    """The 15 float32 boundaries: the code of u is the number of boundaries below u."""
    table = codebook4(signed)
    return frozen((table[:-1] + table[1:]) / numpy.float32(2.0))


@cache
def ladder4() -> numpy.ndarray[Any, Any]:
    """Of the signed map 65,536 / (entry i + 1 − entry i), 15 float32: how far up its step a number is, in 16 bits."""
    table = codebook4(True).astype(numpy.float64)
    return frozen(65536.0 / (table[1:] - table[:-1]))


def frozen(values: Any) -> numpy.ndarray[Any, Any]:
    """Rounded to float32 once, and read-only."""
    array = numpy.array(values, dtype=numpy.float64).astype(numpy.float32)
    array.setflags(write=False)
    return array
