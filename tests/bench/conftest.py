"""A small part of the standard library in place of all of it: the same code, a tenth of the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skimp.bench import library, text

SOME = {"asyncio", "email", "importlib", "logging", "unittest", "json", "http", "shelve"}


@pytest.fixture
def some_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    whole = text.parsed_files

    def some() -> Iterator[Any]:
        return whole(SOME)

    monkeypatch.setattr(library, "parsed_files", some)
    monkeypatch.setattr(text, "parsed_files", some)
    library.found.cache_clear()
    yield
    library.found.cache_clear()
