"""Back to the newest sound checkpoint, or to the beginning, in the living run: for steps that cannot be taken again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skimp.core.memory.process import give_back
from skimp.core.rng import seed_everything
from skimp.run import faults
from skimp.run.build import Run, build
from skimp.run.checkpoint_folder import latest
from skimp.run.folder import truncate_jsonl
from skimp.run.saving import open_newest, restore_adapter, restore_optimizer, restore_place, weights_from
from skimp.run.watchdog import Watchdog

if TYPE_CHECKING:
    from skimp.run.loop import Loop


class GoBack:
    """Called with a loop between two attempts at a step; afterwards the run is what it was at an earlier step.

    Args:
        recipe, config: the run's.
        fill: puts the first weights into a new model.
        first: the stream's first position.
        watchdog: looks at the blocks of the model, hence at those of a new one.
        say: told of checkpoints that are passed over.
    """

    def __init__(
        self,
        recipe: Any,
        config: dict[str, Any],
        fill: Callable[[Any], None],
        first: dict[str, Any],
        watchdog: Watchdog | None,
        say: Callable[[str], None],
    ) -> None:
        self.recipe, self.config, self.fill, self.first = recipe, config, fill, first
        self.watchdog, self.say = watchdog, say

    def __call__(self, loop: Loop) -> str:
        """Where the run is now, in words.

        Raises:
            CheckpointError: there are checkpoints and none of them is sound.
        """
        state, survived = loop.state, loop.state.survived
        if latest(loop.folder.checkpoints) is None:
            words = "the beginning: nothing was saved yet"
            self._begin(loop.run)
            loop.stream.load_state_dict(self.first)
            kept = {key: getattr(state, key) for key in ("eval_before", "eval_losses", "samples")}
            vars(state).update(vars(type(state)(**kept)))
        else:
            with open_newest(loop.folder.checkpoints, self.say, whole=True) as saved:
                words = saved.path.name
                if loop.run.adapter is None:
                    weights_from(saved)(loop.run.model)
                else:  # its base never moves, or what moved is among the adapter's own tensors
                    restore_adapter(saved, loop.run, saved.meta["base"])
                restore_place(saved, self.recipe, loop.stream, state)
                restore_optimizer(saved, loop.run)
        state.survived = survived
        truncate_jsonl(loop.folder.metrics, state.step)
        truncate_jsonl(loop.folder.evals, state.step)
        loop.begin()
        return words

    def _begin(self, run: Run) -> None:
        """Build the run anew in its own place: whoever holds it holds the new one. The old one goes first."""
        exact, chosen = run.exact, None if run.adapter is None else run.adapter.meta()
        run.close()
        for name in vars(run):
            setattr(run, name, None)
        give_back()
        seed_everything(self.recipe.train.seed)
        vars(run).update(vars(build(self.recipe, exact, self.config, fill=self.fill)))
        if run.adapter is not None and chosen is not None:
            run.adapter.adopt(chosen)
        faults.arm(run)
        if self.watchdog is not None:
            self.watchdog.attach()
