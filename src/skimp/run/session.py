"""A whole training session in a claimed folder: build, resume, evaluate, train, evaluate, sum up.

The text is ready and the plan is made before this begins (`skimp.api.train_recipe` tells the order), so that
every refusal which needs no weights comes before they are loaded.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skimp.core.errors import CheckpointError, OutOfMemory
from skimp.core.memory import shortage
from skimp.core.memory.process import give_back, malloc_policy, reset_peak, resident, set_malloc_policy
from skimp.core.rng import seed_everything
from skimp.core.tiers import Traffic
from skimp.core.units import format_bytes
from skimp.kernels.native import pool
from skimp.run import faults, rule_table
from skimp.run.adapt import check_continued, table_lines
from skimp.run.base import Fingerprinted
from skimp.run.build import Run, build
from skimp.run.calibrated import calibrated
from skimp.run.checkpoint_folder import latest
from skimp.run.choosing import choose_on_text, first_batches
from skimp.run.coded_base import coded_words
from skimp.run.durable import write_json
from skimp.run.environment import environment
from skimp.run.folder import RunFolder, append_jsonl, begun, claim, truncate_jsonl
from skimp.run.goback import GoBack
from skimp.run.loggers.start import Loggers, shown
from skimp.run.loop import Loop, State, watched
from skimp.run.offloaded import check_disk
from skimp.run.prepare import Text, given
from skimp.run.resting import resting_below
from skimp.run.sample import greedy, in_child
from skimp.run.saving import (
    Saver,
    open_newest,
    restore_adapter,
    restore_optimizer,
    restore_place,
    weights_from,
)
from skimp.run.signals import StopRequest
from skimp.run.survive import Survival
from skimp.run.voice import Voice
from skimp.run.watchdog import Watchdog
from skimp.run.weights import init_scratch, load_weights

#: What a file system says when it takes no more: a sentence for the user, not a traceback.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


@dataclass(frozen=True)
class Outcome:
    """summary: the content of summary.json; stopped: "finished", "early stop" or a signal's name."""

    summary: dict[str, Any]
    stopped: str
    folder: Path


@contextmanager
def claimed(
    recipe: Any, fingerprint: Mapping[str, Any], resume: bool, may_change: tuple[str, ...] = ()
) -> Iterator[RunFolder]:
    """The run's output folder, locked. A session that ends before its first step leaves it as it was.

    Args:
        recipe: the run.
        fingerprint: what makes this run this run.
        resume: the folder holds the run; else it is new or empty.
        may_change: keys to name when a resumed recipe differs.

    Raises:
        CheckpointError: the folder is another run's, is in use, or its disk takes no more.
        OutOfMemory: an allocator refused memory where no step can be taken again: while planning or loading.
    """
    with claim(Path(recipe.output), fingerprint, resume, may_change=may_change) as folder, folder.vitals.session():
        try:
            yield folder
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            raise _refused(folder, error) from error
        except (RuntimeError, MemoryError) as error:
            asked = shortage.refused(error)
            if asked is None:
                raise
            raise _short(folder, asked) from error
        finally:
            if not resume:
                folder.release()


def _refused(folder: RunFolder, error: OSError) -> CheckpointError:
    kept = begun(folder.path) and any(folder.checkpoints.glob("step-*/COMPLETE"))
    return CheckpointError(
        f"writing to {error.filename or folder.path}",
        f"{error.strerror or error}",
        "a run keeps its metrics and summary there",
        [
            "free space there, or name an output on another disk",
            *([f"then continue from the last checkpoint: skimp train {folder.path} --resume"] if kept else []),
        ],
    )


def _short(folder: RunFolder, asked: int) -> OutOfMemory:
    doing, held = folder.vitals.record.get("phase", "prepare"), resident().now
    much = f"{format_bytes(asked)} were" if asked else "memory was"
    kept = latest(folder.checkpoints) if folder.checkpoints.is_dir() else None
    return OutOfMemory(
        f"phase '{doing}' within memory",
        f"{much} refused while the process held {format_bytes(held)}",
        "the system, a limit of this process or its control group gives no more",
        [
            "end other programs, or raise the limit (ulimit -v)",
            f"plan for less: budget={int(0.9 * held) // 10**6}MB",
            *([f"then continue from {kept.name}: skimp train {folder.path} --resume"] if kept else []),
        ],
    )


def already_finished(folder: RunFolder, recipe: Any, text: Text) -> Outcome | None:
    """The outcome of a run with nothing left to do: all steps done, or an early stop whose rule still holds.

    Raises:
        CheckpointError: there is no complete checkpoint to go on from.
    """
    with open_newest(folder.checkpoints) as saved:
        state = State(**saved.meta["loop"])
    rule = recipe.eval.early_stop if recipe.eval is not None else None
    early = state.stopped == "early stop" and rule is not None and state.evals_without_gain >= rule.patience
    if state.step < text.schedule.steps and not early:
        return None
    summary = folder.path / "summary.json"
    if not summary.is_file():
        return None  # it died between its last checkpoint and its summary: evaluate and sum up
    found = json.loads(summary.read_text(encoding="utf-8"))
    done = found.get("steps") == state.step and found.get("stopped") in ("finished", "early stop")
    return Outcome(found, found["stopped"], folder.path) if done else None


def train(
    recipe: Any,
    plan: Any,
    source: Any,
    text: Text,
    folder: RunFolder,
    *,
    resume: bool,
    voice: Voice,
    asked: Any = None,
    loggers: Loggers | None = None,
) -> Outcome:
    """Execute exactly what was planned.

    Args:
        recipe: the run.
        plan: a `Plan` that fits; its exact choices are what is built.
        source: the model, with its weights here unless `resume`.
        text: what `prepare_text` gave.
        folder: claimed for this run.
        resume: go on from the newest complete checkpoint.
        voice: where to speak.
        asked: the recipe as it was given, where `auto: approximate` settled on another; it is what a resume reads.
        loggers: open, and told when to begin.
    """
    check_disk(plan.exact, recipe)
    with ExitStack() as stack:
        folder.vitals.beat("load", budget=plan.places.device_budget, planned=plan.peak_bytes, steps=text.schedule.steps)
        stream = text.prepared.stream(recipe.train.batch_tokens)
        stack.callback(stream.close)
        state, saved = State(), None
        if resume:
            saved = stack.enter_context(open_newest(folder.checkpoints, voice.say, whole=True))
            for sentence in restore_place(saved, recipe, stream, state):
                voice.say(sentence)
            truncate_jsonl(folder.metrics, state.step)
            truncate_jsonl(folder.evals, state.step)
            voice.say(f"resumed from {saved.path} at step {state.step}")
        else:
            folder.evals.unlink(missing_ok=True)  # of a session that ended before its first step
        write_json(folder.path / "recipe.json", (asked or recipe).as_dict())
        write_json(folder.path / "plan.json", plan.as_dict())
        seed_everything(recipe.train.seed)
        if loggers is not None:
            loggers.begin(plan.peak_bytes, plan.places.device_budget)

        # The plan's baseline was measured before any tensor; what planning left goes back to the system.
        if plan.places.on_cpu:
            set_malloc_policy(plan.exact.malloc)
            if plan.exact.malloc == "pool":
                pool.install(plan.places.pool_limit(plan.profile.working_bytes))
                stack.callback(pool.remove)
        give_back()
        reset_peak()
        started = time.perf_counter()
        first, plain = stream.state_dict(), _filler(recipe, source, voice)
        begin = calibrated(recipe, source, text, plain, voice.say)
        # What was learned from text is in the checkpoint.
        base = Fingerprinted(begin if saved is None else plain) if recipe.adapter is not None else None
        fill = base or (weights_from(saved) if saved is not None else begin)
        run = build(recipe, plan.exact, source.config, fill=fill)
        stack.callback(run.close)
        if plan.places.on_cpu and plan.exact.malloc == "pool":
            pool.set_limit(plan.places.pool_limit(plan.profile.working_bytes, resting_below(run, pool.SMALLEST)))
        for line in coded_words(run.model):
            voice.say(line)
        if run.adapter is not None and base is not None:
            check_continued(recipe, base.value)
            for line in table_lines(run.adapter.table(), run.structure.blocks):
                voice.say(line)
        show_rules(run, folder, voice)
        revision = source.revision
        if saved is not None:
            if base is not None:
                restore_adapter(saved, run, base.value)
            restore_optimizer(saved, run)
            revision = saved.meta.get("revision", revision)
            saved.close()
        if run.adapter is not None and run.adapter.waits:
            choose_on_text(run, first_batches(text, recipe, recipe.adapter.batches))
            voice.say(f"adapter: what trains was chosen by {recipe.adapter.select} on the text's first rows")
        facts = {"recipe": recipe.as_dict(), "plan": plan.as_dict(), "revision": revision}
        if base is not None and run.adapter is not None:
            facts |= {"base": base.value, "adapter": run.adapter.meta()}
        saver = Saver(folder.checkpoints, recipe.checkpoint.keep, facts, lambda path: voice.say(f"saved {path}"))
        beside = _Beside(run, recipe, text, voice, state, folder)
        evaluate = beside.evaluate if recipe.eval is not None else None
        faults.arm(run)
        dog = (
            stack.enter_context(Watchdog(run, recipe.budget.host, recipe.survive.margin))
            if recipe.survive.watchdog
            else None
        )
        back = GoBack(recipe, source.config, begin, first, dog, voice.say)
        survival = Survival(plan, source.config, recipe.survive.retries, back, dog, voice.say)
        loop = Loop(run, stream, text.schedule, folder, saver, evaluate, shown(voice, loggers), state, survival)
        with StopRequest() as stop:
            folder.vitals.beat("evaluate", state.step)
            if state.step == 0:
                loop.alive(lambda: beside.before(stop))
            stopped = loop.train(stop)
            if stopped in ("finished", "early stop"):
                folder.vitals.beat("evaluate", state.step)
                loop.alive(beside.after)
        summary = summarise(run, survival.plan, state, stopped, time.perf_counter() - started)
        summary["data"] = {**text.prepared.report.as_dict(), "given": given(stream)}
        summary["rss_peak_bytes"] = max(summary["rss_peak_bytes"], dog.highest if dog else 0)
        if state.step > 0:
            write_json(folder.path / "summary.json", summary)
    folder.vitals.ended(stopped)
    return Outcome(summary, stopped, folder.path)


def show_rules(run: Run, folder: RunFolder, voice: Voice) -> None:
    """Say which rule updates what, at which rate, in how many bytes; the whole table goes into the folder."""
    rows = run.optimizer.table()
    at_once = None
    if run.layers is not None and run.layers.on_switch == "drop":
        at_once = sum(run.optimizer.bytes_of(p) for p in run.optimizer.parameters() if p.requires_grad)
    for line in rule_table.table_lines(rows, run.structure, at_once):
        voice.say(line)
    size = sum(row.state_bytes for row in rows) if at_once is None else at_once
    write_json(folder.path / "optimizer.json", {"state_bytes": size, "parameters": rule_table.as_plain(rows)})


def _filler(recipe: Any, source: Any, voice: Voice) -> Callable[[Any], None]:
    if recipe.model.init == "scratch":
        return lambda model: init_scratch(model, recipe.model.seed)
    return lambda model: load_weights(model, source.weights, voice.loading)


@dataclass(frozen=True)
class _Beside:
    """What happens beside the steps: held-out loss and one sample, before and after."""

    run: Run
    recipe: Any
    text: Text
    voice: Voice
    state: State
    folder: RunFolder
    _known: dict[int, dict[str, float]] = field(default_factory=dict)

    def evaluate(self) -> dict[str, float]:
        """Held-out losses by set at the present step; a step that was evaluated in this process is not again."""
        if self.state.step in self._known:
            return self._known[self.state.step]
        losses = {}
        sets = self.text.prepared.validations
        for name in sets:
            batches = self.text.prepared.validation_batches(self.recipe.eval.tokens, name=name)
            loss, accuracy, tokens = self.run.evaluate(batches)
            of = f" of {name}" if len(sets) > 1 else ""
            self.voice.say(f"held-out loss{of} {loss:.4f} (token accuracy {accuracy:.1%}) on {tokens:,} tokens")
            losses[name] = loss
        self._known.clear()
        self._known[self.state.step] = losses
        return losses

    def _record(self, when: str) -> float:
        losses = self.evaluate()
        self.state.eval_losses[when] = losses
        return watched(losses, self.recipe.eval.watch)

    def before(self, stop: StopRequest) -> None:
        if self.recipe.eval is not None and self.recipe.eval.at_start and not stop.requested:
            self.state.eval_before = self._record("before")
            self._append(0, self.state.eval_before, self.state.eval_losses["before"])
        if self.text.prompt is not None and not stop.requested:
            self.state.samples["before"] = self._sample("before")

    def after(self) -> None:
        if self.recipe.eval is not None and self.recipe.eval.at_end:
            self.state.eval_after = self._record("after")
            every = self.recipe.eval.every
            if every is None or self.state.step % every:  # else it is there already
                self._append(self.state.step, self.state.eval_after, self.state.eval_losses["after"])
        if self.text.prompt is not None:
            self.state.samples["after"] = self._sample("after")

    def _append(self, step: int, loss: float, losses: dict[str, float]) -> None:
        append_jsonl(self.folder.evals, {"step": step, "eval_loss": loss, "eval_losses": losses, "best": False})

    def _sample(self, when: str) -> str:
        prompt = self.text.prompt
        if prompt is None:
            return ""
        ids = greedy(self.run, prompt["ids"], self.recipe.sample.tokens, prompt["end"])
        text: str = in_child(str(self.text.tokenizer), {"decode": [ids]})["texts"][0]
        self.voice.say(f"sample {when}: {self.recipe.sample.prompt}{text}")
        return text


def summarise(run: Run, plan: Any, state: State, stopped: str, wall: float) -> dict[str, Any]:
    """The stable content of summary.json."""
    return {
        "planned_peak_bytes": plan.profile.phases["train"],
        "measured_peak_bytes": state.measured_peak or None,
        "planned_rss_bytes": plan.peak_bytes if plan.places.on_cpu else None,
        "rss_peak_bytes": resident().peak,
        "rss_baseline_bytes": plan.places.baseline,
        "tokens_per_second": state.tokens / state.seconds if state.seconds else None,
        "seconds_per_step": state.seconds / state.step if state.step else None,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "eval_loss_before": state.eval_before,
        "eval_loss_after": state.eval_after,
        "eval_losses": state.eval_losses,
        "steps": state.step,
        "stopped": stopped,
        "wall_seconds": wall,
        "samples": state.samples,
        "survived": state.survived,
        "away": {**state.away, "hidden": Traffic(**state.away).hidden} if state.away else None,
        "malloc_policy": malloc_policy(),
        "plan": plan.as_dict(),
        "adapter_table": None if run.adapter is None else [asdict(row) for row in run.adapter.table()],
        "optimizer_table": rule_table.as_plain(run.optimizer.table()),
        "versions": environment(),
    }
