"""What goes into a checkpoint and comes back out: model, optimizer, data position, random and loop state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skimp.core import rng
from skimp.core.coded_trained import stored
from skimp.core.errors import CheckpointError, DamagedCheckpoint
from skimp.optim.state import state_key
from skimp.run import checkpoint, checkpoint_read
from skimp.run.build import Run
from skimp.run.checkpoint_folder import complete_steps, latest, set_aside
from skimp.run.checkpoint_read import Checkpoint
from skimp.run.environment import differences, environment
from skimp.run.folder import begun
from skimp.run.layers import restore_layers
from skimp.run.tensor_bytes import Later, Spec

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

    def newest(self) -> Path | None:
        """The newest complete checkpoint, whichever process wrote it."""
        return latest(self.root)

    def save(self, loop: Loop, best: bool = False, data: Mapping[str, Any] | None = None, spare: int = 0) -> Path:
        """One complete checkpoint of the present step.

        Args:
            loop: between two steps.
            best: mark it as the best so far.
            data: position in the data, when it is not the stream's present one.
            spare: keep so many older checkpoints more than usual.

        Raises:
            CheckpointError: no room or a failing disk; the last good checkpoint is intact.
        """
        run = loop.run
        tensors = [
            (state_key(n, k), state_entry(run.optimizer, n, v))
            for n, k, v in run.optimizer.named_state()
            if isinstance(v, Tensor)
        ]
        numbers = {state_key(n, k): v for n, k, v in run.optimizer.named_state() if not isinstance(v, Tensor)}
        meta = {
            **self.facts,
            "loop": loop.state.as_dict(),
            "optimizer": {"rule": run.recipe.optimizer.name, "numbers": numbers},
            "data": data if data is not None else loop.stream.state_dict(),
            "rng": rng.capture(),
            "environment": environment(),
        }
        if run.layers is not None:
            meta["layers"] = run.layers.state_dict()
        if run.adapter is not None:
            meta["adapter_values"] = run.adapter.values()
        if run.events:
            meta["events"] = run.events.state_dict()
        groups: dict[str, list[tuple[str, Tensor | Later]]] = {**weight_groups(run), "optimizer": tensors}
        keep = self.keep + spare
        path = checkpoint.save(self.root, loop.state.step, groups, meta, keep=keep, best=best)
        if self.said is not None:
            self.said(path)
        return path


def state_entry(optimizer: Any, name: str, value: Tensor) -> Tensor | Later:
    """A state as a checkpoint takes it: of one that lives elsewhere each piece goes back when it is written."""
    away = optimizer.away
    if away is None or not away.holds(name):
        return value
    return Later(Spec(value.dtype, tuple(value.shape)), lambda: value, lambda piece: away.give_back([piece]))


def weight_groups(run: Run) -> dict[str, list[tuple[str, Tensor | Later]]]:
    """What a checkpoint holds of the weights: with an adapter what it trains; the base comes from its own source."""
    if run.adapter is not None:
        return {"adapter": list(run.adapter.named_state())}
    return {"model": list(stored(run.model))}


class _Lazily(Mapping[str, Any]):
    """Optimizer state from a checkpoint, one tensor at a time."""

    def __init__(self, saved: Checkpoint, numbers: Mapping[str, Any]) -> None:
        self._saved, self._numbers = saved, numbers
        self._names = set(saved.names("optimizer")) if "optimizer" in saved.groups else set()

    def __getitem__(self, key: str) -> Any:
        if key in self._numbers:
            return self._numbers[key]
        if key not in self._names:
            raise KeyError(key)
        return self._saved.read("optimizer", key)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers or key in self._names  # a mapping's own way would read the tensor

    def fill(self, key: str, tensor: Tensor, passed: Callable[[Tensor], None] | None) -> None:
        """Read one straight into `tensor`; `passed`, if any, is told of every piece.

        Raises:
            KeyError: there is none. CheckpointError: as reading.
        """
        if key not in self._names:
            raise KeyError(key)
        self._saved.read_into("optimizer", key, tensor, passed)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._numbers, *self._names])

    def __len__(self) -> int:
        return len(self._numbers) + len(self._names)


def open_newest(root: Path, say: Callable[[str], None] | None = None, whole: bool = False) -> Checkpoint:
    """The newest sound checkpoint of a run, opened: a context manager.

    One whose bytes changed on disk is set aside under another name, and the one before it is taken: the steps
    between are repeated to the bit.

    Args:
        root: the run's checkpoint folder.
        say: told of every checkpoint that is passed over, and why.
        whole: read every tensor against its checksum first; else only the state is checked, and nothing set aside.

    Raises:
        CheckpointError: there is none; names those that are not complete or damaged, and why.
    """
    good, broken = complete_steps(root) if root.is_dir() else ([], [])
    say = say or (lambda _: None)
    for sentence in broken:
        say(f"passed over {sentence}")
    damaged: list[tuple[Path, str]] = []
    for path in reversed(good):
        try:
            found = _sound(path) if whole else checkpoint_read.load(path)
        except DamagedCheckpoint as error:
            damaged.append((path, f"{path}: {error.asked}: {error.found}"))
            continue
        for spoiled, sentence in damaged:
            aside = f"; set aside as {set_aside(spoiled).name}" if whole else ""
            say(f"passed over {sentence}{aside}; going on from {path.name}")
        return found
    broken += [sentence for _, sentence in damaged]
    raise CheckpointError(
        f"resume the run in {root.parent}",
        "no complete checkpoint" + "".join(f"; {sentence}" for sentence in broken),
        "a save did not finish or was damaged" if broken else "the run ended before its first save",
        [
            f"remove {root.parent} and start again, with checkpoint.every set",
            "name another output folder: output=…",
        ]
        if begun(root.parent)
        else "start it without --resume",
    )


def _sound(path: Path) -> Checkpoint:
    saved = checkpoint_read.load(path)
    try:
        saved.verify()
    except BaseException:
        saved.close()
        raise
    return saved


def restore_place(saved: Checkpoint, recipe: Any, stream: Any, state: State) -> list[str]:
    """Position in the data and the loop's own state; a mismatch is found before a model is built.

    Returns:
        Sentences on what differs between the machine that saved and this one.

    Raises:
        CheckpointError: saved with another optimizer or of other data.
    """
    rule = saved.meta["optimizer"]["rule"]
    if rule != recipe.optimizer.name:
        raise CheckpointError(
            f"optimizer '{recipe.optimizer.name}'",
            f"'{rule}' in {saved.path}",
            "its states do not convert",
            f"optimizer={rule}",
        )
    stream.load_state_dict(saved.meta["data"])
    for key, value in saved.meta["loop"].items():
        setattr(state, key, value)
    state.stopped = ""  # it goes on from there
    return differences(saved.meta["environment"], environment())


def weights_from(saved: Checkpoint) -> Callable[[nn.Module], None]:
    """What fills a model from a checkpoint, tensor by tensor, instead of from the pretrained weights."""

    @torch.no_grad()
    def fill(model: nn.Module) -> None:
        saved.read_all("model", stored(model))

    return fill


@torch.no_grad()
def restore_adapter(saved: Checkpoint, run: Run, base: str) -> None:
    """What an adapter trains, onto a base that was loaded from its own source; nothing without an adapter.

    Args:
        saved: the checkpoint. run: built on the base. base: the base's fingerprint.

    Raises:
        CheckpointError: the base is not the one the adapter was trained on.
    """
    if run.adapter is None:
        return
    expected = saved.meta["base"]
    if base != expected:
        raise CheckpointError(
            f"resume the adapter in {saved.path}",
            f"a base with fingerprint {base}",
            f"it was trained on one with {expected}: the weights in {run.recipe.model.name} have changed since",
            "put the weights of that time there again, or start a new run on the new ones",
        )
    if run.adapter.waits:
        run.adapter.adopt(saved.meta["adapter"])
    saved.read_all("adapter", run.adapter.named_state())
    run.adapter.load_values(saved.meta.get("adapter_values", {}))


def restore_optimizer(saved: Checkpoint, run: Run) -> None:
    """Optimizer states, step count and random state, when the run is built and draws no more numbers.

    Raises:
        CheckpointError: damaged, or of another model or optimizer.
    """
    numbers = saved.meta["optimizer"]["numbers"]
    held = None
    if run.layers is not None:
        restore_layers(run, saved.meta["layers"])
        held = {name for name in run.delivery.parameters if state_key(name, "step") in numbers}
    if run.events:
        run.events.load_state_dict(saved.meta["events"])
    run.optimizer.load_named_state(_Lazily(saved, numbers), held)
    run.delivery.step_index = saved.step
    rng.restore(saved.meta["rng"])
