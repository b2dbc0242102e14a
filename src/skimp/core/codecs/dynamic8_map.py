"""The two codebooks of dynamic 8-bit and their midpoints, as numpy arrays that are equal on every machine.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv 2110.02861, section 2.1
and figure 2; with 0 and +1 added and the edges of bitsandbytes, whose published tables these equal bit for
bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy

DECADES = 7


@cache
def codebook(signed: bool) -> numpy.ndarray[Any, Any]:
    """The 256 sorted float32 entries.

    Decade i of 0…6 scales by 10**(i−6) the midpoints of 2**i (signed) or 2**(i+1) (unsigned) equal parts of
    [0.1, 1]; signed mirrors them. With 0 and +1 that is 2·127 + 2 = 256 or 254 + 2 = 256. There is no −1.
    Edges and midpoints are rounded to float32 as in the published table, to which this one is equal bit for
    bit.
    """
    entries = [0.0, 1.0]
    for i in range(DECADES):
        parts = 2**i if signed else 2 ** (i + 1)
        edges = _edges(parts)
        middles = ((edges[:-1] + edges[1:]) / numpy.float32(2.0)).astype(numpy.float32)
        scaled = numpy.float32(10.0 ** (i - DECADES + 1)) * middles
        entries += list(scaled) + (list(-scaled) if signed else [])
    table = numpy.array(sorted(entries), dtype=numpy.float32)
    table.setflags(write=False)
    return table


def _edges(parts: int) -> numpy.ndarray[Any, Any]:
    """`parts` + 1 float32 edges of [0.1, 1], from the nearer end, each rounded once.

    Not `torch.linspace`: its last bit depends on whether the CPU fuses the multiply and the add, and a table
    that depends on the machine would decode another machine's checkpoint to other numbers.
    """
    first = float(numpy.float32(0.1))
    step = float((numpy.float32(1.0) - numpy.float32(0.1)) / numpy.float32(parts))
    low = [first + step * k for k in range((parts + 1) // 2)]
    high = [1.0 - step * (parts - k) for k in range((parts + 1) // 2, parts + 1)]
    return numpy.array(low + high).astype(numpy.float32)


@cache
def midpoints(signed: bool) -> numpy.ndarray[Any, Any]:
    """The 255 float32 boundaries: the code of u is the number of boundaries below u."""
    table = codebook(signed)
    middle = ((table[:-1] + table[1:]) / numpy.float32(2.0)).astype(numpy.float32)
    middle.setflags(write=False)
    return middle


def zero_code(signed: bool) -> int:
    """The code that decodes to exactly 0: 127 signed, 0 unsigned."""
    return 127 if signed else 0
