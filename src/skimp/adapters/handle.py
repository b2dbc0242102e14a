"""What every adapter is to the rest of the house: a model that trains something small, and the way back.

A method is a class with `Facts` in the room's `__init__`. `attach` puts it on a model with its weights in place (real
or simulated), `rebuild` does the same from what a checkpoint says; the handle they give knows what trains, what a
checkpoint must hold, what is said of it, and how it leaves the model again. Planning, training, resuming, evaluating
and exporting know nothing else of any method.

A method that changes weights (W becomes another W) gives `merging`: evaluation, generation and a merged export then
read base and adapter as one model, tensor by tensor. One that adds modules of its own sets `merges = False`; those
phases attach it to the loaded base instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from skimp.adapters.merge import Merged
from skimp.core.coded import Coded
from skimp.core.coded_model import Coder
from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.events import Event
from skimp.core.structure import Structure


@dataclass(frozen=True)
class Row:
    """One adapted or fully trained module: `target` is what it matched, `rank` 0 when trained in full."""

    module: str
    target: str
    shape: tuple[int, ...]
    rank: int
    parameters: int
    bytes: int


class Merging(Protocol):
    """A saved adapter as changes of weights.

    Attributes:
        changed: names of the base's parameters that it changes; they are read in float32 and rounded once, later.
    """

    changed: frozenset[str]

    def apply(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """The new value of the parameter `name`, one of `changed`.

        Args:
            value: the base's own, float32, which may be changed in place.
            transposed: its layer stores (inputs, outputs), as GPT-2's do.
        """
        ...


@runtime_checkable
class CodedMerging(Merging, Protocol):
    """A saved adapter that changes what a base's codes stand for."""

    def kept(self, name: str, codec: Any, shape: torch.Size, dtype: torch.dtype) -> Coded | None:
        """What the layer of the parameter `name` was kept in, where the adapter brings its own codes, else None."""
        ...

    def of_codes(self, name: str, coded: Coded, original: Tensor | None) -> Tensor:
        """The new value of the parameter `name`, (outputs, inputs) float32.

        Args:
            coded: what its layer was kept in.
            original: the weight before it was coded, float32 (outputs, inputs), where the change shall go onto that.
        """
        ...


class Handle(ABC):
    """An adapter on a model.

    Attributes:
        name: the method, as in a recipe.
        model, structure: what it is on. merged: forwards are those of plain weights that hold the change.
        merges: the method is a change of weights, so that `merging` exists.
    """

    merges: ClassVar[bool] = True
    #: `named_state` holds every weight of the model, so that no base has to lie anywhere.
    whole: ClassVar[bool] = False
    name: str
    model: nn.Module
    structure: Structure
    merged: bool = False
    #: What trains is still to be chosen on text (`look`), or to be read from a checkpoint (`adopt`); until then it must
    #: not train.
    waits: bool = False

    def _freeze_base(self) -> None:
        """Nothing of the model trains; before the adapter's own parameters are in it."""
        self._trained = {name: p.requires_grad for name, p in self.model.named_parameters()}
        self.model.requires_grad_(False)

    def _thaw_base(self) -> None:
        """What trained before trains again; when the adapter's own parameters are out."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._trained[name])

    # ---- how it comes about

    @classmethod
    @abstractmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> Handle:
        """Put it on a model; everything else in the model is frozen.

        Args:
            asked: every key of the recipe's `adapter:` that the method takes, with its value, and "name".
            seed: address of whatever is drawn.

        Raises:
            SkimpError: what was asked cannot be on this model; the model is as it was.
        """

    @classmethod
    @abstractmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> Handle:
        """The handle whose `meta` this is, its tensors not yet filled; the model may be without storage."""

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> Merging:
        """A saved adapter as changes of weights.

        Args:
            meta: as `meta()` gave. names: of the saved tensors, as `named_state` gives them; `get` reads one.
        """
        raise cls.no_weights("a merged model")

    @classmethod
    def merges_into(cls, meta: Mapping[str, Any], model: nn.Module, structure: Structure) -> bool:
        """Whether this saved adapter is a change of weights that this model, without storage, has."""
        return cls.merges

    @classmethod
    def few(cls, asked: Mapping[str, Any], model: nn.Module, structure: Structure) -> dict[str, Any]:
        """Keys to change so that every block of a model cut to a few of them gets what any block gets: never under.

        Nothing where every block is alike anyway. Also the place to refuse what can be refused before a search.

        Args:
            asked: as `attach`, and "seed".
        """
        return {}

    @classmethod
    def coders(
        cls, asked: Mapping[str, Any], model: nn.Module, structure: Structure, codec: Any
    ) -> Mapping[str, Coder]:
        """Layer -> what makes its codes in the codec's place, of a method that has a say in them.

        Args:
            asked: as `attach`. model: its layers still dense, without values. codec: of the base; None without one.
        """
        return {}

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """JSON from which `rebuild` makes it again; "name" among it."""

    # ---- what there is

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything trained, by the name it has in the model."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The same without names."""
        return (p for _, p in self.named_parameters())

    @abstractmethod
    def additions(self) -> Iterator[Tensor]:
        """Every tensor the method put beside the base, trained or not."""

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor a checkpoint needs beside the original base, under names of its own; filled in place."""
        yield from self.named_parameters()

    def values(self) -> dict[str, Any]:
        """Plain state beside the tensors, as JSON."""
        return {}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Put back what `values` gave."""
        if values:
            raise SkimpError(f"the state of adapter '{self.name}'", f"{', '.join(values)}", "it keeps none")

    def look(  # noqa: B027 (most methods wait for nothing)
        self, rows: Iterable[Any], walk: Callable[[Any], Any], loss: Callable[[Any], Tensor]
    ) -> None:
        """Choose what trains on text, where the method `waits` for it.

        Args:
            rows: batches of one row. walk: runs the model on one. loss: gives its mean loss, to go backward from.
        """

    def adopt(self, meta: Mapping[str, Any]) -> None:  # noqa: B027
        """Take what was chosen from a checkpoint's `meta`, where the method `waits` for it."""

    @abstractmethod
    def table(self) -> list[Row]:
        """One row a module, fully trained ones first."""

    def module(self, name: str) -> Any:
        """A module of the model by its full name."""
        return self.model.get_submodule(name)

    # ---- how it trains

    def lr_scale(self, name: str) -> float:
        """Factor on the learning rate of one trained parameter."""
        return 1.0

    def events(self, optimizer: Any) -> list[Event]:
        """What happens every so many optimizer steps."""
        return []

    def after_step(self) -> None:  # noqa: B027 (most methods have nothing to mend)
        """Once the optimizer has moved everything: bring what trained back to where it belongs."""

    def peaks(self) -> dict[str, int]:
        """Bytes above what rests, by phase, that no optimizer step shows: attaching, merging on the way."""
        return {}

    def asleep(self) -> frozenset[str]:
        """Names of trained parameters that need not move in the first step; `assert_effect` looks at them."""
        return frozenset()

    def still(self) -> frozenset[str]:
        """Names of trained parameters whose first gradient is exactly 0, whatever the data: a step that needs a
        gradient's direction, as a projection does, waits for their second."""
        return frozenset()

    @abstractmethod
    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Did it act in the first step?

        Args:
            before, after: some numbers of every trained parameter by name around the step.

        Raises:
            EffectError: names what did not.
        """

    def check_frozen(self) -> None:
        """Nothing but what the adapter names trains.

        Raises:
            EffectError: it is merged, or weights of the base train.
        """
        if self.merged:
            raise EffectError("an adapter that trains", "it is merged: forwards leave it out")
        awake = {n for n, p in self.model.named_parameters() if p.requires_grad}
        extra = awake - {n for n, _ in self.named_parameters()}
        if extra:
            raise EffectError("a frozen base", f"it trains: {', '.join(sorted(extra)[:5])}")

    def freeze(self) -> None:
        """Train nothing any longer: for use."""
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    # ---- how it leaves

    def merge(self, keep: bool = False, probe: Callable[[], Tensor] | None = None) -> Merged:
        """Put the change into the weights; forwards are the base's own from then on.

        Args:
            keep: hold what `unmerge` and `detach` need to restore the base to the bit.
            probe: gives logits of a few tokens; run before and after for the largest difference.
        """
        raise self.no_weights("merge")

    def unmerge(self) -> None:
        """Take it out again."""
        raise self.no_weights("unmerge")

    @abstractmethod
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """Leave the model as it was, to the bit.

        Args:
            base: original weights by parameter name, of whatever was changed in place and not kept.
        """

    @torch.no_grad()
    def load(self, tensors: Callable[[str], Tensor]) -> None:
        """Fill everything in `named_state`, `tensors(name)` giving each.

        Raises:
            SkimpError: a shape that differs, by name.
        """
        for name, target in self.named_state():
            value = tensors(name)
            if value.shape != target.shape:
                raise SkimpError(
                    f"an adapter's {name}",
                    f"shape {tuple(value.shape)}",
                    f"this base needs {tuple(target.shape)}",
                    "an adapter goes on the base it was trained on",
                )
            target.copy_(value)

    def peft(self, base_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The adapter for Hugging Face PEFT: adapter_config.json, and tensors by their names in it.

        Raises:
            ConflictError: PEFT has no such adapter.
        """
        raise self.no_peft()

    @classmethod
    def no_peft(cls) -> ConflictError:
        """Refusal of what PEFT has no form of."""
        return ConflictError(
            f"adapter '{cls.name}' in PEFT's format",
            "no form of it there",
            "PEFT would not know what the tensors mean",
            "--to merged: one plain model" if cls.merges else "--to adapter: a folder that skimp loads on the base",
        )

    @classmethod
    def no_weights(cls, asked: str) -> ConflictError:
        """Refusal of what only a change of weights can do."""
        return ConflictError(
            f"{asked} of {cls.__name__}",
            "it adds modules of its own",
            "no single set of weights computes what base and modules compute together",
            ["--to adapter: a folder that skimp loads on the base", "use it attached: eval, generate and resume do"],
        )
