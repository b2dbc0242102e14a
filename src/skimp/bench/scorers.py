"""How a generated answer is marked: exactly, or by its final number."""

from __future__ import annotations

import re
from decimal import Decimal

#: A number as people write it: thousands with commas, a sign, a fraction.
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def first_line(text: str) -> str:
    """The first line that says something, without blanks around it."""
    return text.strip().partition("\n")[0].strip()


def exact(answer: str, right: str) -> bool:
    """The first line equals the right one, blanks around it aside."""
    return first_line(answer) == first_line(right) != ""


def final_number(text: str) -> Decimal | None:
    """The first number after the last "####"; where there is no mark, the last number of the text; None without any."""
    _, mark, after = text.rpartition("####")
    found = NUMBER.findall(after if mark else text)
    if not found:
        return None
    return Decimal((found[0] if mark else found[-1]).replace(",", ""))


def number(answer: str, right: str) -> bool:
    """Both end in the same number: 1,000 is 1000.0."""
    wanted = final_number(right)
    return wanted is not None and final_number(answer) == wanted
