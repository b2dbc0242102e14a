"""What the shell offers after TAB: recipe files, runs, methods, and `key=value` from the recipe's own schema.

Completion runs at every press of a key, so nothing here imports torch, and the schema (which needs pydantic, half a
second) is asked once: its keys are kept in the cache for as long as the files that define them do not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skimp.recipe.keys import Key

Offer = tuple[str, str]
#: How deep a run is looked for below the folder that is typed: `runs/quickstart`.
DEPTH = ("*", "*/*")
#: Characters of an explanation.
LONGEST = 70


def recipes(incomplete: str) -> Iterator[Offer]:
    """YAML files, runs, and the folders on the way to them."""
    runs = list(run_folders(incomplete))
    known = {f"{folder}/" for folder, _ in runs}
    yield from (offer for offer in _paths(incomplete, ("*.yaml", "*.yml"), "a recipe") if offer[0] not in known)
    yield from runs


def recipe_or_override(incomplete: str) -> Iterator[Offer]:
    """The first word of `plan`, which may be an override where --model is given."""
    yield from recipes(incomplete)
    if "=" in incomplete or (incomplete and "/" not in incomplete):
        yield from overrides(incomplete)


def run_folders(incomplete: str) -> Iterator[Offer]:
    """Folders that hold a run."""
    base = Path(incomplete) if incomplete.endswith("/") else Path(incomplete or ".").parent
    found = {path.parent for depth in DEPTH for path in base.glob(f"{depth}/run.json")}
    for folder in sorted(found):
        if str(folder).startswith(incomplete):
            yield str(folder), "a run"


def method_names(incomplete: str) -> Iterator[Offer]:
    """Names of methods with their summaries."""
    from skimp.core.registry import methods

    yield from _matching(incomplete, ((name, facts.summary) for name, facts in methods().items()))


def models(incomplete: str) -> Iterator[Offer]:
    """Presets, folders and model files."""
    yield from _values("model", incomplete)


def opened(incomplete: str) -> Iterator[Offer]:
    """What can be evaluated, generated with and exported: runs first, then all that `model` takes."""
    runs = list(run_folders(incomplete))
    known = {f"{folder}/" for folder, _ in runs}
    yield from runs
    yield from (offer for offer in models(incomplete) if offer[0] not in known)


def cards(incomplete: str) -> Iterator[Offer]:
    """Cards to plan for."""
    yield from _matching(incomplete, (offer for offer in _devices() if offer[0] not in ("cpu", "cuda")))


def update_rules(incomplete: str) -> Iterator[Offer]:
    """Names of update rules."""
    yield from _matching(incomplete, _named("update rule"))


def precisions(incomplete: str) -> Iterator[Offer]:
    """What `precision:` takes."""
    yield from _values("precision", incomplete)


def attacked(incomplete: str) -> Iterator[Offer]:
    """Categories of memory that some method shrinks."""
    yield from _matching(incomplete, ((value, "") for value in facts_of("attacks")))


def kinds(incomplete: str) -> Iterator[Offer]:
    """Kinds of methods."""
    yield from _matching(incomplete, ((value, "") for value in facts_of("kind")))


def stages(incomplete: str) -> Iterator[Offer]:
    """Stages of a model's life that some method is for."""
    yield from _matching(incomplete, ((value, "") for value in facts_of("stages")))


def facts_of(attribute: str) -> list[str]:
    """Every value an attribute of the methods takes: what `--attacks`, `--kind` and `--stage` accept."""
    from skimp.core.registry import methods

    values = (getattr(facts, attribute) for facts in methods().values())
    return sorted({v for value in values for v in ((value,) if isinstance(value, str) else value)})


def overrides(incomplete: str) -> Iterator[Offer]:
    """`train.` then `train.schedule=` then `train.schedule=cosine`."""
    name, equals, value = incomplete.partition("=")
    known = recipe_keys()
    if not equals:
        above = name.rpartition(".")[0]
        for key in known:
            if key.above == above and key.path.startswith(name):
                yield (
                    (f"{key.path}.", _brief(f"section: {key.about}"))
                    if key.section
                    else (f"{key.path}=", _brief(key.about))
                )
                if key.section and (key.path in VALUES or key.choices):
                    yield f"{key.path}=", _brief(key.about)
        return
    if any(key.path == name for key in known):
        yield from ((f"{name}={word}", about) for word, about in _values(name, value))


def _values(name: str, incomplete: str) -> Iterator[Offer]:
    """What a key takes: names of its registry, its choices, files."""
    if name in VALUES:
        yield from _matching(incomplete, VALUES[name]())
    key = next(key for key in recipe_keys() if key.path == name)
    yield from _matching(incomplete, ((choice, "") for choice in key.choices))
    if name in TAKES_FILES:
        yield from _paths(incomplete, _patterns(name), "a file")


def _patterns(name: str) -> tuple[str, ...]:
    known = TAKES_FILES[name]
    if known is not None:
        return known
    from skimp.data.sources import SUFFIXES

    return tuple(f"*{suffix}" for suffix in SUFFIXES)


def recipe_keys() -> list[Key]:
    """The keys of a recipe, from the cache while the schema's sources are unchanged."""
    from skimp.data.fingerprint import cache_folder
    from skimp.recipe.keys import Key, keys

    stamp = _stamp()
    path = cache_folder() / "completion.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return [Key(**{**row, "choices": tuple(row["choices"])}) for row in kept["keys"]]
    from skimp.recipe import json_schema

    found = keys(json_schema())
    with suppress(OSError):  # no cache: the next press of a key asks again
        from skimp.run.durable import write_json

        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"stamp": stamp, "keys": [vars(key) for key in found]})
    return found


def _stamp() -> list[list[int | str]]:
    import skimp.recipe

    folder = Path(skimp.recipe.__file__).parent
    return [[p.name, p.stat().st_mtime_ns, p.stat().st_size] for p in sorted(folder.glob("*.py"))]


def _models() -> Iterator[Offer]:
    from skimp.recipe import presets

    for name, preset in presets().items():
        yield name, f"{preset.parameters / 1e6:,.0f} million parameters"


def _named(kind: str) -> Iterator[Offer]:
    from skimp.core.registry import methods

    yield from ((name, facts.summary) for name, facts in methods().items() if facts.kind == kind)


def _devices() -> Iterator[Offer]:
    from skimp.recipe import cards

    yield from (("cpu", "train here"), ("cuda", "plan for a card"))
    yield from ((name, f"{card.size_gb} GB: plan for this card") for name, card in cards().items())


#: Keys whose values are names that are not in the schema.
VALUES = {
    "model": _models,
    "model.name": _models,
    "optimizer": lambda: _named("update rule"),
    "optimizer.name": lambda: _named("update rule"),
    "adapter": lambda: _named("adapter"),
    "adapter.name": lambda: _named("adapter"),
    "device": _devices,
}
#: Keys that name a file, and its patterns; None for whatever data is read from.
TAKES_FILES: dict[str, tuple[str, ...] | None] = {
    "data.train": None,
    "data.validation": None,
    "model": ("*.gguf", "config.json"),
    "output": (),
}


def _paths(incomplete: str, patterns: Iterable[str], about: str) -> Iterator[Offer]:
    """Files of some patterns and all folders that begin as typed; a folder keeps its slash, to be gone on from."""
    typed = Path(incomplete)
    base = typed if incomplete.endswith("/") or not incomplete else typed.parent
    prefix = "" if str(base) == "." and not incomplete.startswith(".") else f"{base}/".replace("//", "/")
    with suppress(OSError):
        for path in sorted(base.iterdir()):
            name = prefix + path.name
            if not name.startswith(incomplete) or path.name.startswith((".", "__")):
                continue
            if path.is_dir():
                yield f"{name}/", "a folder"
            elif any(path.match(pattern) for pattern in patterns):
                yield name, about


def _matching(incomplete: str, offers: Iterable[Offer]) -> Iterator[Offer]:
    return ((word, _brief(about)) for word, about in offers if word.startswith(incomplete))


def _brief(about: str) -> str:
    """One short line: an offer is one line of the answer, and a longer one would be wrapped into two."""
    return about if len(about) <= LONGEST else about[: LONGEST - 1].rstrip() + "…"
