"""What the rest of the house may count on: one interface for every adapter, keys by method, modules of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle, Row
from skimp.core import registry
from skimp.core.errors import ConflictError, RecipeError
from skimp.core.option import Option
from skimp.core.registry import Facts, load, methods
from skimp.recipe import load_recipe
from skimp.run.adapt import adapt, merging_of, put_back


class Shift(Handle):
    """A method with a module of its own: a trained shift of the final norm's output."""

    merges = False
    name = "shift"

    def __init__(self, model: nn.Module, structure: Any, width: int) -> None:
        self.model, self.structure, self.width = model, structure, width
        model.requires_grad_(False)
        norm: Any = self.module("model.norm")
        norm.shift = nn.Parameter(torch.zeros(width))
        plain = norm.forward
        norm.forward = lambda x: plain(x) + norm.shift

    @classmethod
    def attach(cls, model: nn.Module, structure: Any, asked: Mapping[str, Any], seed: int) -> Handle:
        return cls(model, structure, asked["width"])

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Any, meta: Mapping[str, Any]) -> Handle:
        return cls(model, structure, meta["width"])

    def meta(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "model.norm.shift", self.module("model.norm").shift

    def additions(self) -> Iterator[Tensor]:
        return self.parameters()

    def table(self) -> list[Row]:
        return [Row("model.norm", "shift", (self.width,), 0, self.width, 4 * self.width)]

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        self.check_frozen()

    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        del self.module("model.norm").forward


@pytest.fixture
def shift(monkeypatch: pytest.MonkeyPatch) -> None:
    width = Option(64, "Numbers of the shift.", least=1)
    where = f"{__name__}:Shift"
    known = {**methods(), "shift": Facts("shift", "adapter", "a shift", where, (), False, options={"width": width})}
    monkeypatch.setattr(registry, "_methods", known)


def recipe(adapter: Any) -> Any:
    return load_recipe({"model": "tiny", "data": {"train": "pydoc"}, "output": "x", "adapter": adapter}, ())


@pytest.mark.usefixtures("shift")
def test_a_method_takes_its_own_keys_and_refuses_those_of_others() -> None:
    assert recipe({"name": "shift", "width": "32"}).adapter.asked() == {"name": "shift", "width": 32}
    assert load_recipe(recipe("shift").as_dict(), ()).adapter.asked() == {"name": "shift", "width": 64}
    for wrong, said in (
        ({"name": "shift", "r": 4}, r"adapter\.r[\s\S]*shift takes width"),
        ({"name": "shift", "widht": 4}, r"adapter\.widht[\s\S]*did you mean 'width'"),
        ({"name": "shift", "width": 0}, r"adapter\.width[\s\S]*at least 1"),
        ({"name": "shift", "from": "x"}, r"adapter\.from[\s\S]*no such key"),
        ({"name": "lora", "width": 4}, r"adapter\.width[\s\S]*lora takes r, alpha"),
    ):
        with pytest.raises(RecipeError, match=said):
            recipe(wrong)


@pytest.mark.usefixtures("shift")
def test_a_method_with_modules_of_its_own_is_attached_again_and_is_no_set_of_weights(
    make_tiny: Callable[..., Any],
) -> None:
    from skimp.core.structure import read_structure

    model = make_tiny("llama")
    asked = recipe("shift")
    handle = adapt(model, read_structure(model), asked)
    assert handle is not None
    assert merging_of(handle.meta(), ["model.norm.shift"], lambda name: torch.zeros(64), model) is None
    value = torch.linspace(-1, 1, 64)
    other = make_tiny("llama")
    again = put_back(other, read_structure(other), handle.meta(), lambda name: value)
    again.freeze()
    assert not any(p.requires_grad for p in other.parameters())
    assert torch.equal(other.model.norm.shift, value)
    for refused in (handle.merge, handle.unmerge, lambda: Shift.merging({}, frozenset(), lambda n: value)):
        with pytest.raises(ConflictError, match="modules of its own"):
            refused()
    with pytest.raises(ConflictError, match=r"'shift' in PEFT's format"):
        handle.peft("base")


def test_every_registered_adapter_is_a_handle() -> None:
    found = [name for name, f in methods().items() if f.kind == "adapter"]
    assert found
    for name in found:
        assert issubclass(load(name, "adapter"), Handle), name
