"""The tables of 8-bit and 4-bit blocks as the C source takes them."""

from __future__ import annotations

import ctypes
from functools import cache

from skimp.core.codecs.block4_map import codebook4, ladder4
from skimp.core.codecs.dynamic8_lookup import BINS, FIRST_BIN, lookup
from skimp.core.codecs.dynamic8_map import codebook, zero_code


class Map(ctypes.Structure):
    """`map_t` of the C source. Bare pointers: into arrays that are cached for the life of the process."""

    _fields_ = (
        ("decode", ctypes.c_void_p),
        ("middle", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("first_bin", ctypes.c_int32),
        ("bins", ctypes.c_int32),
        ("zero", ctypes.c_int32),
    )


@cache
def native_map(signed: bool) -> Map:
    """The tables of one codebook: 1 kB, 1 kB and 24 kB, which stay in the first-level cache."""
    start, middle = lookup(signed)
    pointers = [array.ctypes.data for array in (codebook(signed), middle, start)]
    return Map(*pointers, FIRST_BIN, BINS, zero_code(signed))


class Map4(ctypes.Structure):
    """`map4_t` of the C source: the signed map's entries, and how steps between them are measured."""

    _fields_ = (("entries", ctypes.c_float * 16), ("rise", ctypes.c_float * 16))


@cache
def native_map4() -> Map4:
    """128 bytes, passed whole."""
    entries, rise = codebook4(True).tolist(), ladder4().tolist()  # host value: numpy
    return Map4((ctypes.c_float * 16)(*entries), (ctypes.c_float * 16)(*rise, 0.0))
