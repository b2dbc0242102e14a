"""A whole training session: claim the folder, prepare the text, build, resume, train, evaluate, sum up.

Order matters for memory and for manners: every refusal that needs no weights comes before they are loaded, and the
text is tokenised in a child before the model exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skimp.core.errors import CheckpointError, DataError
from skimp.core.memory.process import give_back, malloc_policy_is_set, reset_peak, resident
from skimp.core.rng import seed_everything
from skimp.core.schedule import Schedule
from skimp.data import TextData, prepare
from skimp.run.build import Run, build
from skimp.run.checkpoint_folder import latest
from skimp.run.durable import write_json
from skimp.run.environment import environment
from skimp.run.folder import claim, truncate_jsonl
from skimp.run.loop import Loop, Progress, State
from skimp.run.sample import greedy, in_child
from skimp.run.saving import Saver, restore
from skimp.run.signals import StopRequest
from skimp.run.weights import init_scratch, load_weights


@dataclass(frozen=True)
class Outcome:
    """summary: the content of summary.json; stopped: "finished", "early stop" or a signal's name."""

    summary: dict[str, Any]
    stopped: str
    folder: Path


class Voice:
    """What a session tells; the command line overrides it with a screen, a library user may ignore it."""

    def say(self, text: str) -> None:
        """A sentence for a person."""

    def reading(self, event: dict[str, Any]) -> None:
        """Progress of tokenising."""

    def loading(self, done: int, total: int) -> None:
        """Progress of loading weights."""

    def step(self, progress: Progress) -> None:
        """A finished optimizer step."""


def text_data(recipe: Any) -> TextData:
    """The data room's description of the recipe's text."""
    data = recipe.data
    tokens = data.validation_tokens if data.validation is None else None
    return TextData(
        train=list(data.train), seq_len=data.seq_len, validation=data.validation, validation_tokens=tokens,
        packing=data.packing, too_long=data.too_long, field=data.field, encoding=data.encoding, seed=data.seed,
        streaming=data.streaming,
    )


def train(
    recipe: Any, plan: Any, source: Any, fingerprint: dict[str, Any], *, resume: bool = False,
    voice: Voice | None = None, may_change: tuple[str, ...] = (),
) -> Outcome:
    """Execute exactly what was planned.

    Args:
        recipe: the run.
        plan: a `Plan` that fits; its exact choices are what is built.
        source: the model with its weights here (`recipe.fetch_model`).
        fingerprint: what makes this run this run.
        resume: go on from the newest complete checkpoint.
        voice: where to speak.
        may_change: keys to name when a resumed recipe differs.
    """
    voice = voice or Voice()
    output = Path(recipe.output)
    with claim(output, fingerprint, resume, may_change=may_change) as folder:
        return _in_folder(recipe, plan, source, folder, resume, voice)


def _in_folder(recipe: Any, plan: Any, source: Any, folder: Any, resume: bool, voice: Voice) -> Outcome:
    write_json(folder.path / "recipe.json", recipe.as_dict())
    write_json(folder.path / "plan.json", plan.as_dict())
    prepared = prepare(
        text_data(recipe), source.tokenizer, vocabulary=source.config["vocab_size"], progress=voice.reading
    )
    for line in prepared.report.lines():
        voice.say(line)
    if recipe.eval is not None and prepared.validation is None:
        raise DataError(
            "eval: held-out text", "no validation set", instead=["data.validation=0.05", "eval=null"]
        )
    stream = prepared.stream(recipe.train.batch_tokens)
    schedule = make_schedule(recipe, prepared)
    prompt = _prompt(recipe, source)
    seed_everything(recipe.train.seed)

    # The plan's baseline was measured before any tensor; what planning left behind goes back to the system first.
    give_back()
    reset_peak()
    started = time.perf_counter()
    run = build(recipe, plan.exact, source.config, fill=_filler(recipe, source, voice))
    state = State()
    if resume:
        _resume(run, stream, folder, state, voice)
    saver = Saver(
        folder.checkpoints, recipe.checkpoint.keep,
        {"recipe": recipe.as_dict(), "plan": plan.as_dict(), "revision": source.revision},
        lambda path: voice.say(f"saved {path}"),
    )

    def evaluate() -> float:
        loss, accuracy, tokens = run.evaluate(prepared.validation_batches(recipe.eval.tokens))
        voice.say(f"held-out loss {loss:.4f} (token accuracy {accuracy:.1%}) on {tokens:,} tokens")
        return loss

    loop = Loop(
        run, stream, schedule, folder, saver, evaluate if recipe.eval is not None else None, voice.step, state
    )
    with StopRequest() as stop:
        if state.step == 0:
            if recipe.eval is not None and recipe.eval.at_start:
                state.eval_before = evaluate()
            if prompt is not None:
                state.samples["before"] = _sample(run, recipe, source, prompt, voice, "before")
        stopped = loop.train(stop)
        if stopped in ("finished", "early stop"):
            if recipe.eval is not None and recipe.eval.at_end:
                state.eval_after = evaluate()
            if prompt is not None:
                state.samples["after"] = _sample(run, recipe, source, prompt, voice, "after")
    summary = summarise(run, plan, state, loop, stopped, time.perf_counter() - started)
    write_json(folder.path / "summary.json", summary)
    run.close()
    if hasattr(stream, "close"):
        stream.close()
    return Outcome(summary, stopped, folder.path)


def make_schedule(recipe: Any, prepared: Any) -> Schedule:
    """The learning-rate schedule over the run's optimizer steps; `epochs` are counted in whole rows."""
    train = recipe.train
    steps = train.steps
    if steps is None:
        rows = prepared.rows_per_epoch
        if rows is None:
            raise DataError(
                "train.epochs of a streamed text", "its length is not known before it was read",
                instead="give train.steps, or data.streaming=false",
            )
        steps = max(1, int(train.epochs * rows // recipe.rows_per_step))
    warmup = train.warmup
    if isinstance(warmup, int) and warmup >= steps:
        warmup = max(0, steps - 1)  # a shortened run (three steps of the quickstart) still reaches its rate
    return Schedule(
        train.lr, steps, train.schedule, warmup, train.min_lr, train.decay if train.decay is not None else 0.2
    )


def _filler(recipe: Any, source: Any, voice: Voice) -> Callable[[Any], None]:
    if recipe.model.init == "scratch":
        return lambda model: init_scratch(model, recipe.model.seed)
    return lambda model: load_weights(model, source.weights, voice.loading)


def _resume(run: Run, stream: Any, folder: Any, state: State, voice: Voice) -> None:
    newest = latest(folder.checkpoints)
    if newest is None:
        raise CheckpointError(
            f"resume the run in {folder.path}", "no complete checkpoint", "it died before its first save",
            f"remove {folder.path} and start again, with checkpoint.every set",
        )
    for sentence in restore(run, stream, newest, state):
        voice.say(sentence)
    state.stopped = ""
    truncate_jsonl(folder.metrics, state.step)
    truncate_jsonl(folder.path / "evals.jsonl", state.step)
    voice.say(f"resumed from {newest} at step {state.step}")


def _prompt(recipe: Any, source: Any) -> dict[str, Any] | None:
    if recipe.sample is None:
        return None
    found: dict[str, Any] = in_child(str(source.tokenizer), {"encode": recipe.sample.prompt})
    return found


def _sample(run: Run, recipe: Any, source: Any, prompt: dict[str, Any], voice: Voice, when: str) -> str:
    ids = greedy(run, prompt["ids"], recipe.sample.tokens, prompt["end"])
    text: str = in_child(str(source.tokenizer), {"decode": [ids]})["texts"][0]
    voice.say(f"sample {when}: {recipe.sample.prompt}{text}")
    return text


def summarise(run: Run, plan: Any, state: State, loop: Loop, stopped: str, wall: float) -> dict[str, Any]:
    """The stable content of summary.json."""
    peak = resident().peak
    return {
        "planned_peak_bytes": plan.profile.phases["train"],
        "measured_peak_bytes": loop.measured_peak,
        "planned_rss_bytes": plan.peak_bytes if plan.places.on_cpu else None,
        "rss_peak_bytes": peak,
        "rss_baseline_bytes": plan.places.baseline,
        "tokens_per_second": state.tokens / state.seconds if state.seconds else None,
        "seconds_per_step": state.seconds / state.step if state.step else None,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "eval_loss_before": state.eval_before,
        "eval_loss_after": state.eval_after,
        "steps": state.step,
        "stopped": stopped,
        "wall_seconds": wall,
        "samples": state.samples,
        "malloc_policy": malloc_policy_is_set(),
        "plan": plan.as_dict(),
        "optimizer_table": [asdict(row) for row in run.optimizer.table()],
        "versions": environment(),
    }
