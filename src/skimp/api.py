"""`skimp.plan(...)` and `skimp.train(...)`: whole runs from Python, the same that the command line does."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skimp.core.errors import CheckpointError, DoesNotFit, RecipeError, SkimpError
from skimp.core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from skimp.plan.plan import Plan
    from skimp.plan.trial import Trial
    from skimp.run.session import Outcome
    from skimp.run.voice import Voice

Source = str | PathLike[str] | Mapping[str, Any]


def plan(
    recipe: Source,
    *overrides: str,
    gpu: str | None = None,
    memory: str | int | None = None,
    budget: str | int | None = None,
    offer: bool = True,
    also: Collection[str] = (),
) -> Plan:
    """Will it fit, and how? Simulates the very run that `train` would execute; loads no weights.

    Args:
        recipe: path of a YAML recipe, or the same as a mapping.
        overrides: "key=value" each, as on the command line.
        gpu: plan for this card ("24GB", "rtx-4090") whatever the recipe says.
        memory: bytes on that device instead of the card's own.
        budget: short for the override "budget=…".
        offer: simulate the approximate ways when nothing exact fits.
        also: "frontier", "explain" and "arena" fill `Plan.frontier`, `Plan.decisions` and `Plan.arena`.

    Returns:
        A `Plan`; `.fits` says whether it does.

    Raises:
        SkimpError: a bad recipe, model or device; names the key.
    """
    from skimp.recipe import check_model, load_recipe, resolve_model

    described = load_recipe(recipe, [*overrides, *([f"budget={budget}"] if budget is not None else [])])
    source = resolve_model(described.model)
    check_model(described, source)
    return plan_recipe(described, source, gpu=gpu, memory=memory, offer=offer, also=also)


def probe(
    recipe: Source, *overrides: str, memory: str | int | None = None, budget: str | int | None = None
) -> tuple[Plan, Trial]:
    """`plan`, then two real steps of it in a process of their own, with random weights of the same shapes.

    What was measured goes into this machine's log; when it was more than planned, the plan is made again with it.

    Raises:
        SkimpError: as `plan`; a plan for a card, or one that does not fit (`DoesNotFit`); the steps failed.
    """
    from skimp.plan.trial import trial
    from skimp.recipe import check_model, load_recipe, resolve_model

    described = load_recipe(recipe, [*overrides, *([f"budget={budget}"] if budget is not None else [])])
    source = resolve_model(described.model)
    check_model(described, source)
    found = plan_recipe(described, source, memory=memory)
    taken = trial(described, source.config, found)
    return (plan_recipe(described, source, memory=memory) if taken.above else found), taken


def drawn(recipe: Source, *overrides: str, of: Plan, budget: str | int | None = None) -> dict[str, Any]:
    """The simulated step of a plan over predicted seconds, by category, owner and operator: what `--html` draws.

    Args:
        recipe, overrides, budget: what the plan is of.
        of: the plan.
    """
    from skimp.plan.drawn import drawn as draw_plan
    from skimp.plan.make import device_rates
    from skimp.recipe import load_recipe, resolve_model

    described = load_recipe(recipe, [*overrides, *([f"budget={budget}"] if budget is not None else [])])
    config = resolve_model(described.model).config
    return draw_plan(described, config, of, device_rates(of.places, described, config))


def plan_recipe(
    recipe: Any,
    source: Any,
    *,
    gpu: str | None = None,
    memory: str | int | None = None,
    offer: bool = True,
    text_bytes: int = 0,
    also: Collection[str] = (),
) -> Plan:
    """`plan` for a recipe and model source that are already resolved; `text_bytes` of tokens are on disk."""
    from skimp.core.memory.process import set_malloc_policy
    from skimp.kernels.native import pool
    from skimp.plan.make import make_plan

    on_cpu = (gpu or recipe.device) == "cpu"
    pinned = recipe.exact.malloc if on_cpu else None
    if on_cpu and not set_malloc_policy() and pinned is not None:
        raise RecipeError(
            f"exact.malloc={pinned}",
            "a C library that is not glibc",
            "its allocator takes no policy",
            "exact.malloc=null",
        )
    if pinned == "pool" and not pool.available():
        raise RecipeError(
            "exact.malloc=pool", pool.why(), instead=["python -m skimp.kernels.native", "exact.malloc=return"]
        )
    bytes_ = None if memory is None else parse_bytes(memory, "memory")
    return make_plan(
        recipe, source.config, gpu=gpu, memory=bytes_, label=source.name, offer=offer, text_bytes=text_bytes, also=also
    )


def train(
    recipe: Source,
    *overrides: str,
    budget: str | int | None = None,
    resume: bool = False,
    voice: Voice | None = None,
) -> Outcome:
    """Plan, then run exactly that.

    Args:
        recipe, overrides, budget: as `plan`.
        resume: go on from the newest complete checkpoint in the recipe's output folder.
        voice: told of everything; None is silent.

    Returns:
        The outcome; `.summary` is the content of summary.json.

    Raises:
        DoesNotFit: nothing exact fits the budget; names the smallest that does and the nearest approximate
            ways.
        SkimpError: bad input, a stop on NaN, a full disk.
    """
    from skimp.recipe import load_recipe

    described = load_recipe(recipe, [*overrides, *([f"budget={budget}"] if budget is not None else [])])
    return train_recipe(described, resume=resume, voice=voice)


def train_recipe(recipe: Any, *, resume: bool = False, voice: Voice | None = None) -> Outcome:
    """`train` for a loaded recipe.

    The order is the order of cost: what the recipe alone shows to be wrong, then the folder, then the text,
    then the plan (seconds), then the weights. A refusal leaves the folder as it was.
    """
    from skimp.recipe import check_model, fetch_model, fingerprint, resolve_model
    from skimp.recipe.resume import MAY_CHANGE
    from skimp.run.loggers.start import check_installed, following
    from skimp.run.prepare import prepare_text
    from skimp.run.session import already_finished, claimed
    from skimp.run.session import train as run_session
    from skimp.run.voice import Voice

    voice = voice or Voice()
    check_installed(recipe.log.wanted)
    if resume:
        for sentence in changed_since(recipe):
            voice.say(sentence)
    source = resolve_model(recipe.model)
    check_model(recipe, source)
    check_device(recipe)
    tokenizer: Any = fetch_model(_without_download(source, resume)).tokenizer
    with claimed(recipe, fingerprint(recipe), resume, MAY_CHANGE) as folder:
        text = prepare_text(recipe, source.config, tokenizer, voice)
        if resume and (done := already_finished(folder, recipe, text)) is not None:
            voice.say(
                f"nothing to do: {done.folder} {done.stopped} at step {done.summary['steps']}; "
                "to go on, raise train.steps"
            )
            folder.vitals.ended(done.stopped)
            return done
        folder.vitals.beat("plan")
        settled, found = settle(recipe, source, voice, text.bytes_on_disk())
        # A checkpoint holds the whole model, but of an adapter the adapter alone.
        here = source if resume and recipe.adapter is None else fetch_model(source)
        with following(recipe, folder.path, voice) as loggers:
            try:
                outcome = run_session(
                    settled, found, here, text, folder, resume=resume, voice=voice, asked=recipe, loggers=loggers
                )
            except SkimpError as error:
                remember_end(settled, found, error, voice)
                raise
        remember(settled, found, outcome, voice)
        if recipe.report and outcome.summary["steps"]:
            draw(outcome.folder, voice)
        return outcome


def remember(recipe: Any, found: Plan, outcome: Outcome, voice: Voice) -> None:
    """Planned against measured goes into this machine's log; that it could not is said and no more."""
    from skimp.plan import history

    summary = outcome.summary
    if not summary["steps"]:
        return
    measured = {
        "tensors": summary["measured_peak_bytes"],
        "process": summary["rss_peak_bytes"],
        "seconds": history.steady_seconds(outcome.folder / "metrics.jsonl") or summary["seconds_per_step"],
        "steps": summary["steps"],
        "stopped": outcome.stopped,
        "survived": len(summary["survived"]),
    }
    refused = history.append(history.record(recipe, found, measured, summary["versions"], "run"))
    if refused is not None:
        voice.say(refused)


def remember_end(recipe: Any, found: Plan, error: SkimpError, voice: Voice) -> None:
    """A run that broke off is in the log too, with what its process held at most; plans learn nothing from it."""
    from skimp.core.memory.process import resident
    from skimp.plan import history
    from skimp.run.environment import environment

    measured = {"tensors": None, "process": resident().peak, "seconds": None, "stopped": type(error).__name__}
    refused = history.append(history.record(recipe, found, {**measured, "survived": 1}, environment(), "run"))
    if refused is not None:
        voice.say(refused)


def draw(folder: Path, voice: Voice) -> None:
    """The run's report, by a child process, once the memory of training is given back."""
    from skimp.core.memory.process import give_back
    from skimp.report import start

    give_back()
    for sentence in start.make(folder):
        voice.say(sentence)


def settle(recipe: Any, source: Any, voice: Voice, text_bytes: int = 0) -> tuple[Any, Plan]:
    """The recipe that will run, and its plan. With `auto: approximate` and nothing exact that fits, the first offer
    that fits is taken, said aloud, and planned anew.

    Raises:
        DoesNotFit: nothing allowed fits.
    """
    from skimp.recipe import load_recipe

    found = plan_recipe(recipe, source, text_bytes=text_bytes)
    # The text is ready by now, so what would change its rows is offered and never taken; nor is what would train
    # something else than the model, or make it another.
    untaken = ("data.", "adapter=", "attention=")
    ways = (a for a in found.alternatives if a.fits and not a.exact)
    open_to = (a for a in ways if not any(word.startswith(untaken) for word in a.overrides))
    offered = next(open_to, None)
    if not found.fits and recipe.auto == "approximate" and offered is not None:
        voice.say(f"nothing exact fits; auto: approximate takes {' '.join(offered.overrides)} ({offered.label})")
        recipe = load_recipe(recipe.as_dict(), offered.overrides)
        found = plan_recipe(recipe, source, text_bytes=text_bytes)
    voice.planned(found)
    refuse_unless_fits(found)
    return recipe, found


def _without_download(source: Any, resume: bool) -> Any:
    """The source to get a tokenizer alone from, where weights are still on the Hub or not needed."""
    to_come = source.weights is None and source.hub is not None and source.tokenizer_hub is not None
    return replace(source, init="scratch") if resume or to_come else source


def changed_since(recipe: Any) -> list[str]:
    """What changed between the recipe a run was started with and this one: one sentence a key.

    Raises:
        CheckpointError: a key changed that makes it another run, or the stored recipe cannot be read.
    """
    from skimp.recipe import may_change_on_resume

    stored = Path(recipe.output) / "recipe.json"
    return may_change_on_resume(stored_recipe(stored), recipe) if stored.is_file() else []


def stored_recipe(stored: Path, *overrides: str) -> Any:
    """The recipe a run was started with.

    Raises:
        CheckpointError: recipe.json is damaged.
        RecipeError: an override is wrong.
    """
    from skimp.recipe import load_recipe

    try:
        values = json.loads(stored.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the recipe of the run in {stored.parent}",
            f"{stored.name}: {error}",
            "it is damaged",
            f"skimp train RECIPE.yaml --resume output={stored.parent}",
        ) from error
    return load_recipe(values, overrides)


def check_device(recipe: Any) -> None:
    """Training runs on the CPU in this version; a card can be planned for."""
    if recipe.device != "cpu":
        raise RecipeError(
            f"training on device '{recipe.device}'",
            "this version trains on the CPU only",
            "its kernels and memory rules are proved there; for cards it plans",
            ["device=cpu", f"skimp plan RECIPE --gpu {recipe.device}"],
        )


def refuse_unless_fits(found: Plan) -> None:
    """Raise `DoesNotFit` with the smallest exact run and the offers, or for want of disk or of the machine's memory."""
    available = found.places.available
    if found.fits and available is not None and found.peak_bytes > available:
        raise DoesNotFit(
            f"training {found.model} with a budget of {format_bytes(found.places.device_budget)}",
            f"{format_bytes(available)} available on this machine; the plan takes {format_bytes(found.peak_bytes)}",
            "the system would kill the process",
            [
                "end other programs",
                *([f"budget={available // 10**6}MB: plan for what is there"] if available >= 10**6 else []),
            ],
        )
    if found.fits:
        return
    if found.peak_bytes <= found.places.device_budget:
        raise DoesNotFit(
            f"training {found.model} with {format_bytes(found.places.disk)} of disk",
            f"checkpoints{_and_more(found)} take {format_bytes(found.disk_bytes)}",
            "the new one is written in full before the oldest is removed",
            [
                "checkpoint.keep=1",
                "checkpoint.every=null: one at the end",
                "an output on a larger disk",
                *(["exact.offload.activations=none, exact.offload.optimizer=none"] if found.profile.away else []),
            ],
        )
    smallest = min([found.peak_bytes, *(a.peak_bytes for a in found.alternatives if a.exact)])
    ways = [
        f"budget={_rounded_up(smallest)}: the smallest exact run takes {format_bytes(smallest)}"
        f" ({found.exact.describe(found.blocks, found.rows)})"
    ]
    ways += [
        f"{' '.join(a.overrides)}: {format_bytes(a.peak_bytes)}{'' if a.fits else ', still too much'}; {a.label}"
        for a in found.alternatives
        if not a.exact
    ]
    raise DoesNotFit(
        f"training {found.model} within {format_bytes(found.places.device_budget)} on {found.places.device}",
        f"the smallest exact run takes {format_bytes(smallest)}",
        f"the peak is in {found.profile.peak.where()}",
        ways,
    )


def _and_more(found: Plan) -> str:
    """What else the disk is to hold, in words."""
    offloaded = found.profile.away.get("disk", 0)
    text = f", the text as tokens ({format_bytes(found.places.text_bytes)})" if found.places.text_bytes else ""
    return text + (f" and what is offloaded ({format_bytes(offloaded)})" if offloaded else "")


def _rounded_up(size: int) -> str:
    """A budget to type: `size` in whole MB and 5 more, as a baseline measured again is never the same."""
    return f"{-(-size // 10**6) + 5}MB"
