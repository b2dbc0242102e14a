"""What goes into a checkpoint and comes back out: model, optimizer, data position, random state, loop state, plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skimp.core import rng
from skimp.core.errors import CheckpointError
from skimp.optim.base import state_key
from skimp.run import checkpoint, checkpoint_read
from skimp.run.build import Run
from skimp.run.environment import differences, environment

if TYPE_CHECKING:
    from skimp.run.loop import Loop, State


class Saver:
    """Writes the whole state of a loop.

    Args:
        root: the run's checkpoint folder.
        keep: complete checkpoints kept.
        facts: plain values stored beside the state: recipe, plan, model source.
        said: called with the path of each finished checkpoint.
    """

    def __init__(
        self, root: Path, keep: int, facts: Mapping[str, Any], said: Callable[[Path], None] | None = None
    ) -> None:
        self.root, self.keep, self.facts, self.said = root, keep, dict(facts), said

    def save(self, loop: Loop, best: bool = False) -> Path:
        """One complete checkpoint of the present step.

        Raises:
            CheckpointError: no room or a failing disk; the last good checkpoint is intact.
        """
        run = loop.run
        tensors = [(state_key(n, k), v) for n, k, v in run.optimizer.named_state() if isinstance(v, Tensor)]
        numbers = {state_key(n, k): v for n, k, v in run.optimizer.named_state() if not isinstance(v, Tensor)}
        meta = {
            **self.facts,
            "loop": loop.state.as_dict(),
            "optimizer": {"rule": run.recipe.optimizer.name, "numbers": numbers},
            "data": loop.stream.state_dict(),
            "rng": rng.capture(),
            "environment": environment(),
        }
        groups = {"model": list(run.model.named_parameters(remove_duplicate=False)), "optimizer": tensors}
        path = checkpoint.save(self.root, loop.state.step, groups, meta, keep=self.keep, best=best)
        if self.said is not None:
            self.said(path)
        return path


class _Lazily(Mapping[str, Any]):
    """Optimizer state from a checkpoint, one tensor at a time."""

    def __init__(self, saved: Any, numbers: Mapping[str, Any]) -> None:
        self._saved, self._numbers = saved, numbers
        self._names = set(saved.names("optimizer")) if "optimizer" in saved.groups() else set()

    def __getitem__(self, key: str) -> Any:
        if key in self._numbers:
            return self._numbers[key]
        if key not in self._names:
            raise KeyError(key)
        return self._saved.read("optimizer", key)

    def __iter__(self) -> Any:
        return iter([*self._numbers, *self._names])

    def __len__(self) -> int:
        return len(self._numbers) + len(self._names)


def restore(run: Run, stream: Any, path: Path, state: State) -> list[str]:
    """Bring run, stream and loop state back, tensor by tensor, into storage that exists.

    Returns:
        Sentences on what differs between the machine that saved and this one.

    Raises:
        CheckpointError: damaged, of another model or optimizer, or of other data.
    """
    with checkpoint_read.load(path) as saved:
        rule = saved.meta["optimizer"]["rule"]
        if rule != run.recipe.optimizer.name:
            raise CheckpointError(
                f"optimizer '{run.recipe.optimizer.name}'", f"'{rule}' in {path}", "its states do not convert"
            )
        with torch.no_grad():
            saved.read_all("model", run.model.named_parameters(remove_duplicate=False))
        run.optimizer.load_named_state(_Lazily(saved, saved.meta["optimizer"]["numbers"]))
        stream.load_state_dict(saved.meta["data"])
        for key, value in saved.meta["loop"].items():
            setattr(state, key, value)
        rng.restore(saved.meta["rng"])
        run.delivery.step_index = state.step
        return differences(saved.meta["environment"], environment())
