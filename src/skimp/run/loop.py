"""The one loop. Techniques plug into the `Run` it is given; none of them forks it.

A step: next batch, learning rate, `run.step`, stops, metrics, then at the boundary evaluation, checkpoint and
signals. Everything that must survive a death is in `state()`; everything else can be made again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from skimp.core.errors import NonFiniteError
from skimp.core.memory.process import resident
from skimp.core.memory.tracker import Tracker
from skimp.core.schedule import Schedule
from skimp.run.build import Run
from skimp.run.effect import Effect
from skimp.run.folder import RunFolder, append_jsonl
from skimp.run.saving import Saver
from skimp.run.signals import StopRequest


@dataclass
class Progress:
    """What a finished step tells the screen."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_second: float
    memory: int
    peak: int


@dataclass
class State:
    """What the loop itself must remember between steps."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    best_eval: float | None = None
    evals_without_gain: int = 0
    eval_before: float | None = None
    eval_after: float | None = None
    stopped: str = ""
    recent: list[float] = field(default_factory=list)
    samples: dict[str, str] = field(default_factory=dict)

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
        evaluate: held-out loss now, or None without validation.
        show: called after every step.
    """

    def __init__(
        self, run: Run, stream: Any, schedule: Schedule, folder: RunFolder, saver: Saver,
        evaluate: Callable[[], float] | None = None, show: Callable[[Progress], None] | None = None,
        state: State | None = None,
    ) -> None:
        self.run, self.stream, self.schedule = run, stream, schedule
        self.folder, self.saver = folder, saver
        self.evaluate, self.show = evaluate, show
        self.state = state or State()
        self.measured_peak = 0
        self._window = deque(self.state.recent, maxlen=run.recipe.train.spike.window)
        self._effect: Effect | None = Effect(run)
        self._started = self.state.step

    def train(self, stop: StopRequest) -> str:
        """Run to the end, or to a stop at a step boundary.

        Returns:
            "finished", "early stop", or the name of the signal.
        """
        recipe, state = self.run.recipe, self.state
        saved = state.step
        while state.step < self.schedule.steps:
            self._step()
            if recipe.eval and recipe.eval.every and state.step % recipe.eval.every == 0 and self.evaluate:
                saved = self._evaluated(saved)
            every = recipe.checkpoint.every
            if every and state.step % every == 0 and saved != state.step:
                saved = self._save(stop)
            if state.stopped or stop.requested:
                break
        outcome = stop.signal_name if stop.requested else state.stopped or "finished"
        wanted = recipe.checkpoint.at_end or stop.requested
        if wanted and saved != state.step and state.step > 0:
            self._save(stop)
        return outcome or "finished"

    def _step(self) -> None:
        state, run = self.state, self.run
        begin = time.perf_counter()
        batch = self.stream.next_step()
        lr = self.schedule.lr_at(state.step)
        run.set_lr(lr)
        if self._tracked():
            result = self._watched(batch)
        else:
            result = run.step(batch)
        seconds = time.perf_counter() - begin
        state.step += 1
        state.tokens += result.trained
        state.seconds += seconds
        state.loss_first = result.loss if state.loss_first is None else state.loss_first
        state.loss_last = result.loss
        if self._effect is not None:
            self._effect.check(run, lr)
            self._effect = None
        self._spike(result.loss)
        memory = resident()
        append_jsonl(
            self.folder.metrics,
            {
                "step": state.step, "loss": result.loss, "grad_norm": result.grad_norm, "lr": lr,
                "tokens": result.trained, "tokens_per_second": result.trained / seconds, "memory_bytes": memory.now,
                "clip_scale": result.clip_scale, "seconds": seconds,
            },
        )
        if self.show is not None:
            self.show(
                Progress(
                    state.step, self.schedule.steps, result.loss, lr, result.trained / seconds, memory.now, memory.peak
                )
            )

    def _tracked(self) -> bool:
        """The second step of a process is watched by the tracker; the only one, when there is no second."""
        done = self.state.step - self._started
        return done == 1 or (done == 0 and self.state.step + 1 >= self.schedule.steps)

    def _watched(self, batch: Any) -> Any:
        tracker = Tracker()
        run = self.run
        tracker.hold((p for _, p in run.parameters()), "weights")
        tracker.hold(run.model.buffers(), "weights")
        states = (v for s in run.optimizer.state.values() for v in s.values() if hasattr(v, "untyped_storage"))
        tracker.hold(states, "optimizer")
        tracker.hold((batch.ids, batch.labels, batch.positions), "batch")
        with tracker:
            result = run.step(batch)
        self.measured_peak = tracker.peak.total
        return result

    def _spike(self, loss: float) -> None:
        """A loss far above its recent level stops the run before it is saved."""
        rule = self.run.recipe.train.spike
        if rule.factor is not None and len(self._window) == rule.window:
            usual = median(self._window)
            if loss > rule.factor * usual:
                raise NonFiniteError(
                    f"a loss within {rule.factor:g} times its recent level", f"{loss:.4g} in optimizer step "
                    f"{self.state.step}; the median of the last {rule.window} is {usual:.4g}",
                    "a spike like this seldom heals", "resume from the last checkpoint with a lower train.lr",
                )
        self._window.append(loss)
        self.state.recent = list(self._window)

    def _evaluated(self, saved: int) -> int:
        state, rule = self.state, self.run.recipe.eval
        assert self.evaluate is not None
        assert rule is not None
        loss = self.evaluate()
        stop = rule.early_stop
        gain = state.best_eval is None or loss < state.best_eval - (stop.min_delta if stop else 0.0)
        append_jsonl(self.folder.path / "evals.jsonl", {"step": state.step, "eval_loss": loss, "best": gain})
        if gain:
            state.best_eval, state.evals_without_gain = loss, 0
            if rule.keep_best:
                self.saver.save(self, best=True)
                return state.step
        else:
            state.evals_without_gain += 1
            if stop is not None and state.evals_without_gain >= stop.patience:
                state.stopped = "early stop"
        return saved

    def _save(self, stop: StopRequest) -> int:
        stop.last_checkpoint = self.saver.save(self)
        return self.state.step
