"""Bytes in and out. GB = 10⁹, GiB = 2³⁰, always printed with the unit, so that nobody has to guess."""

from __future__ import annotations

import re

from skimp.core.errors import SkimpError

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
#: More than any place has; beyond, a size is a slip or no number.
MOST = 10**18


def parse_bytes(text: str | int | float, key: str = "size") -> int:
    """Read '2GB', '1.5 GiB', '512MB' or a plain number of bytes.

    Raises:
        SkimpError: not a size, not positive, larger than any place, or a bare number too small to mean bytes.
    """
    if isinstance(text, bool):
        raise SkimpError(f"{key}: a size in bytes", f"{text!r}", instead="write it as 2GB, 1.5GiB or 512MB")
    if isinstance(text, (int, float)):
        number, unit = float(text), "B"
    else:
        match = re.fullmatch(r"\s*([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if not match or (match.group(2) or "B").upper() not in UNITS:
            why = f"'{match.group(2)}' is none of {', '.join(UNITS)}" if match else "a size is a number and a unit"
            raise SkimpError(f"{key}: a size in bytes", f"{text!r}", why, "write it as 2GB, 1.5GiB or 512MB")
        number, unit = float(match.group(1)), (match.group(2) or "B").upper()
    if not abs(number * UNITS[unit]) <= MOST:  # nor for one that is no number
        raise SkimpError(f"{key}: a size there is", f"{text!r}", instead="write it as 2GB, 1.5GiB or 512MB")
    size = int(number * UNITS[unit])
    if size <= 0:
        raise SkimpError(f"{key}: a positive size", f"{text!r}", instead="write it as 2GB, 1.5GiB or 512MB")
    if unit == "B" and size < 10**6:
        raise SkimpError(
            f"{key}: a size in bytes",
            f"{text!r}, which is {size} bytes",
            "no run fits below 1 MB",
            f"add the unit: {text}GB",
        )
    return size


def format_bytes(size: int | float) -> str:
    """Decimal units, three significant digits: 1_234_567_890 -> '1.23 GB'."""
    value = float(size)
    sign = "-" if value < 0 else ""
    value = abs(value)
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= 0.9995 * factor:
            scaled = value / factor
            digits = 0 if scaled >= 99.95 else 1 if scaled >= 9.995 else 2
            return f"{sign}{scaled:.{digits}f} {unit}"
    return f"{sign}{value:.0f} B"


def format_seconds(seconds: float) -> str:
    """'4.2 s', '3 min 12 s', '5 h 02 min'."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
