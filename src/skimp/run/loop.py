"""The one loop. Techniques plug into the `Run` it is given; none of them forks it.

A step: next batch, learning rate, `run.step`, metrics, stops, then at the boundary evaluation, checkpoint and
signals. Everything that must survive a death is in `State`; everything else can be made again.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from skimp.core.errors import NonFiniteError
from skimp.core.memory.process import resident
from skimp.core.memory.timeline import Timeline, resident_reader
from skimp.core.memory.tracker import CATEGORIES, Tracker
from skimp.core.schedule import Schedule
from skimp.core.tiers import Traffic
from skimp.run.build import Run
from skimp.run.durable import write_file
from skimp.run.effect import Effect
from skimp.run.folder import RunFolder, append_jsonl
from skimp.run.offloaded import traffic
from skimp.run.saving import Saver
from skimp.run.signals import StopRequest
from skimp.run.survive import Survival
from skimp.run.unwell import spiked, suspect
from skimp.run.voice import Progress


@dataclass
class State:
    """What the loop itself must remember between steps; plain values, saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    best_eval: float | None = None
    evals_without_gain: int = 0
    eval_before: float | None = None
    eval_after: float | None = None
    eval_losses: dict[str, dict[str, float]] = field(default_factory=dict)
    measured_peak: int = 0
    stopped: str = ""
    recent: list[float] = field(default_factory=list)
    samples: dict[str, str] = field(default_factory=dict)
    survived: list[str] = field(default_factory=list)
    away: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Loop:
    """Train `run` from its present state to the last step.

    Args:
        run: built and loaded.
        stream: batches of one optimizer step each, resumable.
        schedule: learning rate of every step.
        folder: the claimed run folder.
        saver: writes checkpoints.
        evaluate: held-out loss of each validation set now, or None without validation.
        show: called after every step.
        state: where to begin.
        survival: what to do when memory runs short; None lets the error out.
    """

    def __init__(
        self,
        run: Run,
        stream: Any,
        schedule: Schedule,
        folder: RunFolder,
        saver: Saver,
        evaluate: Callable[[], dict[str, float]] | None = None,
        show: Callable[[Progress], None] | None = None,
        state: State | None = None,
        survival: Survival | None = None,
    ) -> None:
        self.run, self.stream, self.schedule = run, stream, schedule
        self.folder, self.saver = folder, saver
        self.evaluate, self.show = evaluate, show
        self.state = state or State()
        self.survival = survival
        self.notes: list[str] = []
        self._effect: Effect | None = None
        self.begin()

    def begin(self) -> None:
        """Go on from `state` as it is now: at the start, and after it was put back to an earlier step."""
        self._window = deque(self.state.recent, maxlen=self.run.recipe.train.spike.window)
        self._held: tuple[dict[str, Any], Any] | None = None
        self._saved = self.state.step
        self.expect()

    def expect(self) -> None:
        """Check the next step for the effect of every technique, and the one after against the plan."""
        if self._effect is not None:
            self._effect.remove()
        self._effect, self._started = None, self.state.step

    @property
    def place(self) -> dict[str, Any]:
        """Position in the data before the next step, also of one that broke off and will be taken again."""
        place: dict[str, Any] = self.stream.state_dict() if self._held is None else self._held[0]
        return place

    def save(self, spare: int = 0) -> None:
        """Save the present step, unless it is saved already; a step that broke off counts as not begun."""
        if self._saved != self.state.step:
            self.saver.save(self, data=self.place, spare=spare)
            self._saved = self.state.step

    def train(self, stop: StopRequest) -> str:
        """Run to the end, or to a stop at a step boundary.

        Returns:
            "finished", "early stop", or the name of the signal.

        Raises:
            NonFiniteError: a loss or gradient that is not finite, or a spike; names step and parameter.
            CheckpointError: a save failed; the last good checkpoint is intact.
            EffectError: a technique that was switched on did nothing in the first step; names it.
            OutOfMemory: memory ran short and nothing smaller would do; all steps until then are saved.
        """
        recipe, state = self.run.recipe, self.state
        while state.step < self.schedule.steps and not state.stopped and not stop.requested:
            self.alive(self._step)
            if self.survival is not None:
                self.survival.look(self)
            if self.evaluate is not None and _due(recipe.eval.every, state.step):
                self._evaluated(stop)
            if _due(recipe.checkpoint.every, state.step):
                self._save(stop)
        if recipe.checkpoint.at_end or stop.requested:
            self._save(stop)
        return stop.signal_name or state.stopped or "finished"

    def alive(self, action: Callable[[], Any]) -> Any:
        """Do what needs memory; again, and smaller, when it runs short."""
        return action() if self.survival is None else self.survival.guard(self, action)

    def _step(self) -> None:
        state, run = self.state, self.run
        begin = time.perf_counter()
        if self._held is None:
            place = self.stream.state_dict()
            self._held = (place, self.stream.next_step())
        place, batch = self._held
        lr = self.schedule.lr_at(state.step)
        run.set_lr(lr)
        self.folder.vitals.beat("train", state.step)
        first = state.step == self._started
        if first:
            self._effect = Effect(run)
        before = traffic(run)
        try:
            result = self._watched(batch) if self._tracked() else run.step(batch)
        except NonFiniteError as error:
            raise self._explained(error) from error
        self._held = None
        seconds = time.perf_counter() - begin
        lr *= run.events.lr_factor(state.step)
        self.notes += run.notes
        run.notes.clear()
        if self._effect is not None:
            self._effect.check(run, lr)
            self._effect = None
        state.step += 1
        state.tokens += result.trained
        state.seconds += seconds
        state.loss_first = result.loss if state.loss_first is None else state.loss_first
        state.loss_last = result.loss
        memory, rate = resident(), result.trained / seconds
        moved = traffic(run).plus(before, -1)
        if moved.out:
            state.away = asdict(Traffic(**state.away).plus(moved))
        append_jsonl(
            self.folder.metrics,
            {
                "step": state.step,
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": lr,
                "tokens": result.trained,
                "tokens_per_second": rate,
                "memory_bytes": memory.now,
                "memory_peak_bytes": memory.peak,
                "clip_scale": result.clip_scale,
                "seconds": seconds,
                **({"away": asdict(moved)} if moved.out else {}),
                **({"note": "; ".join(self.notes)} if self.notes else {}),
            },
        )
        self.notes.clear()
        if self.show is not None:
            steps = self.schedule.steps
            self.show(Progress(state.step, steps, result.loss, lr, seconds, rate, memory.now, memory.peak))
        self._spike(result.loss)

    def _tracked(self) -> bool:
        """The second step of a process, or after a rebuild, is watched by the tracker; the only one, when there is no
        second."""
        done = self.state.step - self._started
        return done == 1 or (done == 0 and self.state.step + 1 >= self.schedule.steps)

    def _watched(self, batch: Any) -> Any:
        timeline = Timeline(CATEGORIES, resident=resident_reader())
        tracker = Tracker(timeline=timeline)
        self.run.show_to(tracker, batch)
        with tracker:
            result = self.run.step(batch)
        self.state.measured_peak = max(self.state.measured_peak, tracker.peak.total)
        seen = {"step": self.state.step + 1, "operators": tracker.count, "peak": asdict(tracker.peak)}
        seen["chosen"] = self.run.exact.as_dict()
        write_file(self.folder.path / "timeline.json", json.dumps({**seen, **timeline.as_dict()}).encode())
        return result

    def _explained(self, error: NonFiniteError) -> NonFiniteError:
        """Name the parameter; where this step moved nothing, save the state before it: no work is lost."""
        sentence, sound = suspect(self.run)
        ways = [*error.instead, "in another output folder: a resumed run repeats this step bit for bit"]
        if self.run.delivery.midway:
            sentence += "; parameters had moved when it was seen, so the run stands at its last checkpoint"
            ways.append("exact.in_backward=false, or train.clip: every gradient is then seen before the first update")
        elif sound:
            self.save(spare=1)
        kept = self.saver.newest()
        ways.append(f"what was learned until then is in {kept}" if kept else "nothing was saved yet")
        return NonFiniteError(error.asked, f"{error.found}; {sentence}", error.why, ways)

    def _spike(self, loss: float) -> None:
        """A loss far above its recent level stops the run before it is saved."""
        rule = self.run.recipe.train.spike
        if rule.factor is not None and len(self._window) == rule.window:
            trouble = spiked(self.run, loss, list(self._window), self.state.step, self.saver.newest())
            if trouble is not None:
                raise trouble
        self._window.append(loss)
        self.state.recent = list(self._window)

    def _evaluated(self, stop: StopRequest) -> None:
        """Evaluate at a step boundary; keep the best, count towards the early stop."""
        state, rule = self.state, self.run.recipe.eval
        if self.evaluate is None or rule is None:
            return
        self.folder.vitals.beat("evaluate", state.step)
        losses, early = self.alive(self.evaluate), rule.early_stop
        loss = watched(losses, rule.watch)
        gain = state.best_eval is None or loss < state.best_eval - (early.min_delta if early else 0.0)
        append_jsonl(self.folder.evals, {"step": state.step, "eval_loss": loss, "eval_losses": losses, "best": gain})
        if gain:
            state.best_eval, state.evals_without_gain = loss, 0
            if rule.keep_best:
                self._save(stop, best=True)
            return
        state.evals_without_gain += 1
        if early is not None and state.evals_without_gain >= early.patience:
            state.stopped = "early stop"

    def _save(self, stop: StopRequest, best: bool = False) -> None:
        """Save the present step, unless it is saved already; as the best one again, for its mark."""
        if best or self._saved != self.state.step:
            self.folder.vitals.beat("save", self.state.step)
            stop.last_checkpoint = self.alive(lambda: self.saver.save(self, best))
            self._saved = self.state.step


def watched(losses: dict[str, float], name: str | None) -> float:
    """The held-out loss that decides the best state and the early stop: that of `name`, or of the first set."""
    return losses[name] if name is not None else next(iter(losses.values()))


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
