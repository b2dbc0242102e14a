"""What a key of a method's own takes, and how it says so."""

from __future__ import annotations

import pytest

from skimp.core.option import BETAS, EPS, Option


def test_every_kind_reads_its_values_and_their_spelling() -> None:
    assert BETAS.read(["9e-1", 0]) == (0.9, 0.0)
    assert Option(3, "").read("2e2") == 200
    assert Option(None, "", kind="whole").read(None) is None
    assert Option(False, "").read(True) is True
    assert Option("a", "", choices=("a", "b")).read("b") == "b"


@pytest.mark.parametrize(
    ("option", "value", "takes"),
    [
        (BETAS, [0.9], "a list of 2 numbers at least 0 and below 1"),
        (BETAS, [0.9, 1.0], "below 1"),
        (EPS, 0, "a number above 0"),
        (EPS, float("nan"), "a number"),
        (EPS, True, "a number"),
        (EPS, None, "a number"),
        (Option(3, "", least=1), 2.5, "a whole number at least 1"),
        (Option(False, ""), 1, "true or false"),
        (Option("a", "", choices=("a", "b")), "c", "one of a, b"),
    ],
)
def test_what_it_does_not_take_is_refused_in_its_words(option: Option, value: object, takes: str) -> None:
    with pytest.raises(ValueError, match=takes):
        option.read(value)
