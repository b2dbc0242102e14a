"""When memory runs short while training: give the step up, go on smaller, and lose nothing that was learned.

A disk that fills or fails under the activations that wait on it is such a shortage too (`run.disk_fault`): the run goes
on with a plan that does without it.

A step that broke off is taken again with the same rows only where none of its parameters had moved. Stepping in
backward moves them early and an update may break off half done; then the newest sound checkpoint is loaded into the
living run (or the beginning, where there is none yet) and the steps since are repeated. Noise is addressed by name and
step and the data by position, so what is repeated is repeated bit for bit. Retries are counted and end.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from skimp.core.errors import OffloadError, OutOfMemory
from skimp.core.memory.process import give_back, resident, set_malloc_policy
from skimp.core.memory.shortage import refused
from skimp.core.units import format_bytes
from skimp.kernels.native import pool
from skimp.plan.plan import Plan
from skimp.plan.smaller import with_less_disk, with_less_room, with_more_overhead
from skimp.run.disk_fault import DiskFault, give_back_disk, stopped_by_disk
from skimp.run.durable import write_json
from skimp.run.resting import resting_below
from skimp.run.watchdog import Excess, NearlyOut, Watchdog

if TYPE_CHECKING:
    from skimp.run.loop import Loop


@dataclass(frozen=True)
class Shortage:
    """What happened: in words, whether parameters had moved, resident bytes held then, bytes refused (0: unknown), and
    the disk, where that is what failed."""

    story: str
    spoiled: bool
    held: int
    asked: int
    disk: DiskFault | None = None


class Survival:
    """What a loop asks when memory runs short.

    Args:
        plan: what the run was built from; follows every rebuild.
        config: the model's, for planning again.
        retries: how often one step may be tried again.
        restore: puts the newest sound checkpoint, or the beginning, into the loop's run and state; says which.
        watchdog: None without one.
        say: told of everything that was done.
    """

    def __init__(
        self,
        plan: Plan,
        config: dict[str, Any],
        retries: int,
        restore: Callable[[Loop], str],
        watchdog: Watchdog | None,
        say: Callable[[str], None],
    ) -> None:
        self.plan, self.config, self.retries = plan, config, retries
        self.restore, self.watchdog, self.say = restore, watchdog, say
        self._worst = self._tries = 0

    def guard(self, loop: Loop, action: Callable[[], Any]) -> Any:
        """Do `action` until memory suffices for it: a step, an evaluation, a save.

        Raises:
            OutOfMemory: it never did, or the machine is nearly out; what was learned until then is saved.
            OffloadError: a disk failed under what waited there and no plan does without; saved as well.
        """
        while True:
            try:
                return action()
            except (RuntimeError, MemoryError, OSError, OffloadError, NearlyOut) as error:
                short = _understood(loop, error)
                if short is None:
                    raise
            # The exception is gone, and with it the frames that held the tensors of the step.
            self._give_up_step(loop)
            if short.asked < 0:
                self._stop(loop, short, "the system would have killed a process, most likely this one")
            self._again(loop, short)

    def look(self, loop: Loop) -> None:
        """Between two steps: is the process above its budget, or the machine nearly out?

        Raises:
            OutOfMemory: and nothing smaller would do; the step is saved.
        """
        if self.watchdog is None:
            return
        excess = self.watchdog.over(resident())
        if self.watchdog.pressed:
            short = Shortage(self.watchdog.pressed, False, resident().now, -1)
            self._stop(loop, short, "the system would have killed a process, most likely this one")
        if excess is not None:
            self._shrink(loop, excess)

    def _give_up_step(self, loop: Loop) -> None:
        loop.run.delivery.discard()
        if loop.run.offload is not None:
            loop.run.offload.saved.discard()
        loop.expect()
        give_back()

    def _again(self, loop: Loop, short: Shortage) -> None:
        """Restore what is spoiled, find a smaller plan, and let the loop try again; or stop."""
        step = loop.state.step + 1
        if step > self._worst:
            self._worst, self._tries = step, 0
        self._tries += 1
        if self._tries > self.retries:
            self._stop(loop, short, f"it was tried again {self.retries} times")
        if short.disk is not None:
            found = self._smaller(loop, with_less_disk, short.disk.room)
        else:
            found = self._smaller(loop, with_less_room, short.held, short.asked)
        if found is None and self._tries > 1:
            other = "smaller plan that leaves the mathematics alone"
            if short.disk is not None:
                other = "plan within the budget that does without that disk"
            self._stop(loop, short, f"it was tried again, and there is no {other}")
        did = "the step is taken again"
        if found is not None:  # first: what is restored is restored into a run that works
            try:
                self._rebuild(loop, found)
            except OSError as error:  # it needs a place that cannot be had
                self._stop(loop, short, f"the plan that would do needs {error.filename}: {error.strerror}")
        if short.spoiled:
            did = f"parameters had moved, so the run went back to {self.restore(loop)}"
        if found is not None:
            did += f", with {self._described()}"
        self._note(loop, step, f"{short.story}; {did}")

    def _shrink(self, loop: Loop, excess: Excess) -> None:
        """Above the budget: save, count what was not planned for as overhead, and go on under a plan that fits."""
        loop.save(spare=1)
        found = self._smaller(loop, with_more_overhead, excess.peak)
        if found is None:
            self._stop(
                loop,
                Shortage(str(excess), False, excess.peak, 0),
                "with what the process takes beside its tensors, no plan that leaves the mathematics alone fits",
                [f"with budget={-(-excess.peak // 10**6) + 50}MB, if the machine has it"],
            )
        self._rebuild(loop, found)
        self._note(loop, loop.state.step, f"{excess}; saved, and went on with {self._described()}")

    def _smaller(self, loop: Loop, search: Callable[..., Plan | None], *learned: int) -> Plan | None:
        try:
            return search(self.plan, loop.run.recipe, self.config, *learned)
        except (RuntimeError, MemoryError) as error:
            if refused(error) is None:
                raise
            return None  # not even room to plan: the same plan once more, with what was given back

    def _rebuild(self, loop: Loop, plan: Plan) -> None:
        loop.folder.vitals.beat("rebuild", loop.state.step, planned=plan.peak_bytes)
        loop.run.rebuild(plan)
        if plan.places.on_cpu:
            set_malloc_policy(plan.exact.malloc)
            if plan.exact.malloc == "pool":
                outside = resting_below(loop.run, pool.SMALLEST)
                pool.install(plan.places.pool_limit(plan.profile.working_bytes, outside))
            elif self.plan.exact.malloc == "pool":
                pool.remove()
        give_back()
        self.plan = plan
        write_json(loop.folder.path / "plan.json", plan.as_dict())
        loop.saver.facts["plan"] = plan.as_dict()
        loop.state.measured_peak = 0
        loop.expect()
        if self.watchdog is not None:
            self.watchdog.restart()

    def _described(self) -> str:
        return self.plan.exact.describe(self.plan.blocks, self.plan.rows)

    def _note(self, loop: Loop, step: int, text: str) -> None:
        sentence = f"step {step}: {text}"
        loop.notes.append(sentence)
        loop.state.survived.append(sentence)
        self.say(sentence)

    def _stop(self, loop: Loop, short: Shortage, why: str, ways: Sequence[str] = ()) -> NoReturn:
        """Save what is sound and end with what to do."""
        if short.disk is not None:
            give_back_disk(loop.run)
        if not short.spoiled:
            loop.save(spare=1)
        kept, folder = loop.saver.newest(), loop.folder.path
        if short.disk is not None:
            raise stopped_by_disk(loop.state.step + 1, short.story, why, short.disk, kept, folder)
        raise OutOfMemory(
            f"optimizer step {loop.state.step + 1} within memory",
            short.story,
            why,
            [
                f"everything until {kept.name} is saved; continue: skimp train {folder} --resume"
                if kept
                else "nothing was learned yet; start again",
                *(
                    ways
                    or [
                        f"end other programs, or plan for less than the {format_bytes(short.held)} it held: "
                        f"budget={int(0.9 * short.held) // 10**6}MB"
                    ]
                ),
                "unpin what is set under exact:, if anything is; skimp plan lists the approximate ways and their bytes",
            ],
        )


def _understood(loop: Loop, error: BaseException) -> Shortage | None:
    """The shortage behind an exception, whose frames are emptied; None for any other error."""
    delivery, held, disk = loop.run.delivery, resident().now, DiskFault.of(error, loop.run)
    spoiled = delivery.midway or delivery.step_index != loop.state.step
    if disk is not None:
        asked, story = 0, disk.story
    elif isinstance(error, NearlyOut):
        asked, story = -1, str(error)
    else:
        found = refused(error)
        if found is None:
            return None
        asked = found
        much = f"{format_bytes(asked)} were" if 0 < asked < 1 << 50 else "memory was"
        story = f"{much} refused while the process held {format_bytes(held)}"
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
    return Shortage(story, spoiled, held, asked, disk)
