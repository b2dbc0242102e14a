"""The NF4 codebook, made from its definition and held as the published float32 numbers.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, arXiv 2305.14314, section 3 and appendix E: the
quantiles of a normal distribution that cut it into equally likely parts, 8 above zero, 7 below, and an exact zero,
divided by the largest. The published table's last digits depend on the library that computed the quantiles, so the
table is the standard and `derived` its check (equal to 1e-6).
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Any

import numpy

#: 1 - (1/32 + 1/30) / 2: the mean of the outermost levels' tails with 16 and with 15 levels.
OFFSET = 0.9677083

ENTRIES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)  # fmt: skip
#: The code of an exact zero.
ZERO = 7


def derived() -> list[float]:
    """The sixteen levels from the definition, in float64."""
    normal = NormalDist()
    above = [normal.inv_cdf(OFFSET + (0.5 - OFFSET) * k / 8) for k in range(8)]
    below = [-normal.inv_cdf(OFFSET + (0.5 - OFFSET) * k / 7) for k in range(7)]
    most = max(above)
    return sorted(level / most for level in (*above, 0.0, *below))


@cache
def codebook() -> numpy.ndarray[Any, Any]:
    """The 16 sorted float32 entries."""
    return numpy.array(ENTRIES, dtype=numpy.float32)


@cache
def midpoints() -> numpy.ndarray[Any, Any]:
    """The 15 float32 borders: the code of u is the number of borders below u."""
    table = codebook()
    return ((table[:-1] + table[1:]) / numpy.float32(2.0)).astype(numpy.float32)
