"""Look-up tables that find a dynamic 8-bit code in two gathers and one comparison.

The code of u is the number of midpoints below u. A binary search over 255 midpoints mispredicts its branches
(50 ns per element measured, 1.9 ns with the tables). The upper half of u's bits (sign, exponent, 7 bits of
significand) picks a bin so narrow that at most one midpoint lies inside: near 1 a bin is 2**-8 = 0.0039 wide
and midpoints are at least 0.0070 apart. `start` has the number of midpoints below the whole bin; one
comparison settles the rest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy

from skimp.core.codecs.dynamic8_map import midpoints
from skimp.core.errors import SkimpError

#: Upper 16 bits of the magnitudes where bin 0 begins and the last bin lies. 2**-23 = 1.2e-7 is below the
#: smallest midpoint (1.6e-7, unsigned), so everything smaller is one bin.
FIRST_BIN = (127 - 23) << 7
LAST_BIN = 127 << 7
BINS = LAST_BIN - FIRST_BIN + 1


@cache
def lookup(signed: bool) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    """(start, middle): int32 (2·BINS,), positive u then negative u; float32 (256,), the midpoints and
    +infinity.

    Raises:
        SkimpError: two midpoints share a bin, so that one comparison could not tell the codes apart.
    """
    return lookup_of(midpoints(signed))


def lookup_of(
    borders: numpy.ndarray[Any, Any],
) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    """(start, middle) of any sorted midpoints between −1 and 1."""
    middle = numpy.append(borders, numpy.float32("inf")).astype(numpy.float32)
    edges = (numpy.arange(FIRST_BIN, LAST_BIN + 2, dtype=numpy.uint32) << 16).view(numpy.float32)
    lowest, highest = edges[:-1].copy(), numpy.nextafter(edges[1:], numpy.float32(0.0))
    lowest[0] = 0.0
    highest[-1] = 1.0
    start = numpy.concatenate([_codes(lowest, borders), _codes(-highest, borders)]).astype(numpy.int32)
    end = numpy.concatenate([_codes(highest, borders), _codes(-lowest, borders)])
    if (end - start).max() > 1:
        raise SkimpError("look-up bins with at most one midpoint each", "two", instead="use finer bins")
    return start, middle


def _codes(values: numpy.ndarray[Any, Any], borders: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Midpoints below each value: the definition."""
    return numpy.searchsorted(borders, values, side="left")
