"""`skimp.plan(...)` and `skimp.train(...)`: whole runs from Python, the same that the command line does."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from skimp.core.errors import DoesNotFit
from skimp.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from skimp.plan.plan import Plan
    from skimp.run.session import Outcome, Voice

Source = str | PathLike[str] | Mapping[str, Any]


def plan(
    recipe: Source, *overrides: str, gpu: str | None = None, memory: str | int | None = None,
    budget: str | int | None = None, offer: bool = True,
) -> Plan:
    """Will it fit, and how? Simulates the very run that `train` would execute; loads no weights.

    Args:
        recipe: path of a YAML recipe, or the same as a mapping.
        overrides: "key=value" each, as on the command line.
        gpu: plan for this card ("24GB", "rtx-4090") whatever the recipe says.
        memory: bytes on that device instead of the card's own.
        budget: short for the override "budget=…".
        offer: simulate the approximate ways when nothing exact fits.

    Returns:
        A `Plan`; `.fits` says whether it does.

    Raises:
        SkimpError: a bad recipe, model or device; names the key.
    """
    from skimp.recipe import check_model, load_recipe, resolve_model

    described = load_recipe(recipe, [*overrides, *([f"budget={budget}"] if budget is not None else [])])
    source = resolve_model(described.model)
    check_model(described, source)
    return plan_recipe(described, source, gpu=gpu, memory=memory, offer=offer)


def plan_recipe(
    recipe: Any, source: Any, *, gpu: str | None = None, memory: str | int | None = None, offer: bool = True
) -> Plan:
    """`plan` for a recipe and model source that are already resolved."""
    from skimp.core.memory.process import set_malloc_policy
    from skimp.core.memory.warm import warm_baseline
    from skimp.plan.make import make_plan

    if (gpu or recipe.device) == "cpu":
        set_malloc_policy()
        import skimp.run.session  # noqa: F401  (what training imports belongs to the baseline)

        warm_baseline()
    bytes_ = None if memory is None else parse_bytes(memory, "memory")
    return make_plan(recipe, source.config, gpu=gpu, memory=bytes_, label=source.name, offer=offer)


def train(
    recipe: Source, *overrides: str, budget: str | int | None = None, resume: bool = False, voice: Voice | None = None
) -> Outcome:
    """Plan, then run exactly that.

    Args:
        recipe, overrides, budget: as `plan`.
        resume: go on from the newest complete checkpoint in the recipe's output folder.
        voice: told of every step; None is silent.

    Returns:
        The outcome; `.summary` is the content of summary.json.

    Raises:
        DoesNotFit: nothing exact fits the budget; names the smallest that does and the nearest approximate ways.
        SkimpError: bad input, a stop on NaN, a full disk.
    """
    from skimp.recipe import load_recipe

    described = load_recipe(recipe, [*overrides, *([f"budget={budget}"] if budget is not None else [])])
    return train_recipe(described, resume=resume, voice=voice)


def train_recipe(recipe: Any, *, resume: bool = False, voice: Voice | None = None, told: Any = None) -> Outcome:
    """`train` for a loaded recipe; `told(plan)` is called between planning and training."""
    from skimp.recipe import check_model, fetch_model, fingerprint, resolve_model
    from skimp.recipe.resume import MAY_CHANGE
    from skimp.run.session import train as run_session

    source = resolve_model(recipe.model)
    check_model(recipe, source)
    check_device(recipe)
    found = plan_recipe(recipe, source)
    if told is not None:
        told(found)
    refuse_unless_fits(found)
    return run_session(
        recipe, found, fetch_model(source), fingerprint(recipe), resume=resume, voice=voice, may_change=MAY_CHANGE
    )


def check_device(recipe: Any) -> None:
    """Training runs on the CPU in this version; a card can be planned for."""
    from skimp.core.errors import RecipeError

    if recipe.device != "cpu":
        raise RecipeError(
            f"skimp train on device '{recipe.device}'", "this version trains on the CPU only",
            "its kernels and memory rules are proved there; for cards it plans",
            ["device=cpu", f"skimp plan RECIPE --gpu {recipe.device}"],
        )


def refuse_unless_fits(found: Plan) -> None:
    """Raise `DoesNotFit` with the smallest exact run and the offers."""
    if found.fits:
        return
    over_disk = found.disk_bytes > found.places.disk
    smallest = min([found.peak_bytes, *(a.peak_bytes for a in found.alternatives if a.exact)])
    ways = [f"budget of {format_bytes(smallest)}: the smallest exact run ({found.exact.describe(found.blocks, found.rows)})"]
    ways += [
        f"{' '.join(a.overrides)}: {format_bytes(a.peak_bytes)}{'' if a.fits else ', still too much'}; {a.label}"
        for a in found.alternatives if not a.exact
    ]
    raise DoesNotFit(
        f"training {found.model} within {format_bytes(found.places.device_budget)} on {found.places.device}",
        f"the smallest exact run takes {format_bytes(smallest)}"
        + (f"; checkpoints take {format_bytes(found.disk_bytes)} of disk" if over_disk else ""),
        f"the peak is in {found.profile.peak.where()}", ways,
    )
