"""A small part of the standard library in place of all of it: the same code, a tenth of the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from skimp.bench import library, text

SOME = ("asyncio", "email", "importlib", "logging", "unittest", "json", "http", "shelve")


@pytest.fixture(scope="session")
def some_files() -> list[Any]:
    return list(text.parsed_files(SOME))


@pytest.fixture
def some_library(some_files: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "parsed_files", lambda: iter(some_files))
    library.found.cache_clear()
    yield
    library.found.cache_clear()
