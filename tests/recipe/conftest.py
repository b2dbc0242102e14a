from __future__ import annotations

from typing import Any

import pytest

from skimp.core import registry
from skimp.core.option import ADAM
from skimp.core.registry import Facts


@pytest.fixture(autouse=True)
def known_rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two update rules by name, so that these tests do not depend on which ones the house has."""
    if "real_rules" in request.fixturenames:
        return
    rules = {
        name: Facts(name, "update rule", "a rule", "nowhere:Rule", ("optimizer",), True, options=ADAM)
        for name in ("adamw", "adamw8bit")
    }
    monkeypatch.setattr(registry, "_methods", rules)


@pytest.fixture
def raw() -> dict[str, Any]:
    """The shortest recipe there is."""
    return {"model": "smollm2-135m", "data": {"train": "pydoc"}, "output": "runs/quickstart"}


@pytest.fixture
def real_rules() -> None:
    """A test that asks for this sees the house's own registry."""
