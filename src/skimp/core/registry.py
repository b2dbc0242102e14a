"""The registry: what methods there are, with their facts, without importing any of them.

A room lists its methods as `FACTS` in its `__init__`; `where` says which module holds the code, and `load`
imports it only when a run asks. So `skimp methods` answers without torch, and the docs pages, the early
refusals and the planner's moves all come from one record.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from skimp.core.errors import ConflictError, SkimpError, did_you_mean
from skimp.core.option import Option

Kind = Literal[
    "update rule",
    "adapter",
    "saved-tensor policy",
    "loss head",
    "step",
    "codec",
    "data stage",
    "cache",
    "layout",
    "kernel",
    "attention",
    "placement",
]
Attacks = Literal[
    "weights", "gradients", "optimizer", "activations", "logits", "workspace", "cache", "data", "uncertainty"
]  # fmt: skip

#: Kinds that have a key of the recipe to themselves, whose value is the method's name.
_SECTIONS: dict[str, str] = {"update rule": "optimizer", "adapter": "adapter", "attention": "attention"}

#: Why two values of one such key are alternatives and no pair: never a refusal of anything a recipe can say.
_ALTERNATIVES: dict[str, tuple[str, str]] = {
    "update rule": (
        "a parameter moves once a step: two rules would add their moves, and the moments of each would describe a "
        "path that was never taken",
        "one rule, or each rule for parameters of its own",
    ),
    "adapter": (
        "both would take the same layers' weight, and each be trained against a base the other changes",
        "one adapter, merged before the next is begun",
    ),
}

#: The rooms that may hold methods. A new room is one more name here.
ROOMS = ("optim", "adapters", "activations", "losses", "steps", "data", "kernels", "core.codecs")


@dataclass(frozen=True)
class Paper:
    """Where a method comes from. `arxiv` is the bare id, or a URL where there is no preprint."""

    title: str
    year: int
    arxiv: str = ""

    def __str__(self) -> str:
        return f"{self.title} ({self.year}{', arXiv ' + self.arxiv if self.arxiv else ''})"


@dataclass(frozen=True)
class Conflict:
    """Why two methods cannot go together, and the nearest thing that can."""

    reason: str
    instead: str


@dataclass(frozen=True)
class Facts:
    """What is known of a method without importing it.

    Attributes:
        name: the name in recipes, lower case, no spaces.
        kind: one of the extension points of the design.
        summary: one line: what it does and what it saves.
        paper: its source; None for common knowledge.
        attacks: the memory categories it shrinks.
        exact: True when the mathematics of the run does not change; the planner may then choose it freely.
        saves: the byte formula in words, e.g. "2.03 bytes per parameter instead of 8".
        stages: where it applies.
        needs: what must be there (a package, a device), as sentences.
        conflicts: other method names, or whole kinds of them ("adapter"), it cannot go with.
        where: "module:object" with the code.
        recipe: the lines of a recipe that switch it on; empty takes the kind's own (`snippet`).
        trains: of an update rule: codecs whose weights it trains as they are kept.
        rules: of a codec that is part of some update rules: their names. No recipe can ask for it beside another.
        options: keys of its own beside `name`, with their defaults; a recipe refuses every other.
        shared: of an adapter: those of the keys common to adapters that it takes. One of them among `options` gives it
            another default or range.
    """

    name: str
    kind: Kind
    summary: str
    where: str
    attacks: tuple[Attacks, ...]
    exact: bool
    saves: str = ""
    paper: Paper | None = None
    stages: tuple[str, ...] = ("pre-training", "fine-tuning")
    needs: tuple[str, ...] = ()
    conflicts: Mapping[str, Conflict] = field(default_factory=dict)
    recipe: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    trains: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def snippet(self) -> str:
        """The lines of a recipe that switch it on, as YAML; empty for a part of other methods, such as a codec."""
        return self.recipe or (f"{_SECTIONS[self.kind]}: {self.name}" if self.kind in _SECTIONS else "")

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON form of `skimp methods --json`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "paper": str(self.paper) if self.paper else None,
            "attacks": list(self.attacks),
            "exact": self.exact,
            "summary": self.summary,
            "saves": self.saves,
            "stages": list(self.stages),
            "needs": list(self.needs),
            "conflicts": {k: {"reason": c.reason, "instead": c.instead} for k, c in self.conflicts.items()},
            "recipe": self.snippet,
            "options": {key: {"default": o.default, "about": o.about} for key, o in self.options.items()},
            "where": self.where,
        }


_methods: dict[str, Facts] = {}


def methods() -> dict[str, Facts]:
    """All methods by name. Reads each room's `FACTS` once; a duplicate name is an error, never an overwrite."""
    if not _methods:
        found: dict[str, Facts] = {}
        for facts in _from_rooms():
            if facts.name in found:
                raise SkimpError(
                    f"method '{facts.name}' registered once",
                    f"twice: {found[facts.name].where} and {facts.where}",
                    instead="rename one of them",
                )
            found[facts.name] = facts
        _methods.update(found)
    return _methods


def _from_rooms() -> Iterator[Facts]:
    for room in ROOMS:
        yield from importlib.import_module(f"skimp.{room}").FACTS


def facts(name: str, kind: Kind | None = None) -> Facts:
    """The facts of one method; an unknown name answers with the nearest ones."""
    known = {k: f for k, f in methods().items() if kind is None or f.kind == kind}
    if name not in known:
        what = kind or "method"
        raise SkimpError(f"{what} '{name}'", "no such name", instead=did_you_mean(name, known))
    return known[name]


def load(name: str, kind: Kind | None = None) -> Any:
    """Import a method and return its class or function."""
    module, _, attribute = facts(name, kind).where.partition(":")
    return getattr(importlib.import_module(module), attribute)


def check_together(names: list[str]) -> None:
    """Refuse, before anything loads, a pair that cannot go together.

    Raises:
        ConflictError: with the mathematical reason and the way out.
    """
    for one, other in combinations(names, 2):
        conflict = conflict_of(one, other)
        if conflict is not None:
            raise ConflictError(
                f"'{one}' together with '{other}'", "both switched on", conflict.reason, conflict.instead
            )


def conflict_of(one: str, other: str) -> Conflict | None:
    """Why two methods cannot go together, whichever of them says so; None where they can."""
    if alternatives(one, other):
        return Conflict(*_ALTERNATIVES["update rule" if _part_of_another(one, other) else facts(one).kind])
    return refusal(facts(one), facts(other))


def refusal(one: Facts, other: Facts) -> Conflict | None:
    """What either says against the other, by its name or for all of its kind."""
    return _said(one, other) or _said(other, one)


def _said(one: Facts, other: Facts) -> Conflict | None:
    return one.conflicts.get(other.name) or one.conflicts.get(other.kind)


def alternatives(one: str, other: str) -> bool:
    """Whether the two are values of one key of the recipe, so that no recipe can ask for both."""
    same = facts(one).kind == facts(other).kind and facts(one).kind in _ALTERNATIVES
    return same or _part_of_another(one, other)


def _part_of_another(one: str, other: str) -> bool:
    """Whether one of the two is a codec of update rules of which the other is none."""
    pairs = ((facts(one), facts(other)), (facts(other), facts(one)))
    return any(a.rules and b.kind == "update rule" and b.name not in a.rules for a, b in pairs)
