"""Shortened loops: first, one middle standing for all, last."""

from __future__ import annotations

from skimp.core.repeat import rounds, shortened, times


def test_all_rounds_outside_and_three_inside() -> None:
    assert list(rounds(range(0, 50, 10))) == [0, 10, 20, 30, 40]
    with shortened():
        assert [(i, times()) for i in rounds(range(0, 50, 10))] == [(0, 1), (10, 3), (40, 1)]
        assert [(i, times()) for i in rounds(range(3))] == [(0, 1), (1, 1), (2, 1)]
    assert times() == 1


def test_nested_loops_multiply() -> None:
    with shortened():
        total = sum(times() for _ in rounds(range(7)) for _ in rounds(range(9)))
    assert total == 63
