"""Sizes: what is one, and what is said of what is none."""

from __future__ import annotations

import pytest

from skimp.core.errors import SkimpError
from skimp.core.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("1KB", 1000), ("3 GB", 3 * 10**9), ("1.5GiB", 3 * 2**29), ("1e-3gb", 10**6), ("2000000", 2 * 10**6)],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text, "memory") == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lots", "a size is a number and a unit"),
        ("", "a size is a number and a unit"),
        ("nan", "a size is a number and a unit"),
        ("5%", "a size is a number and a unit"),
        ("1PB", "'PB' is none of B, "),
        ("0", "a positive size"),
        ("-3GB", "a positive size"),
        ("1e400GB", "a size there is"),
        ("12", "no run fits below 1 MB"),
    ],
)
def test_what_is_no_size_is_told_why_and_how_one_is_written(text: str, said: str) -> None:
    with pytest.raises(SkimpError) as caught:
        parse_bytes(text, "memory")
    message = caught.value.message()
    assert said in message
    assert "memory: " in message
    assert "GB" in caught.value.message()
