"""Who holds how many bytes at every operator of a step, on real or simulated tensors.

The tracker sits in the dispatcher and counts *storages*, not tensors: views share one. A storage enters when an
operator returns it and leaves when its last owner lets go (a weak reference's callback), so lifetimes are
autograd's own and need no rules. What an operator allocates and frees inside one call is added from the declared
workspaces (`skimp.core.workspace`). The sum is held, byte for byte, against the c10 allocator's own events.

Scopes say what a new storage is for; outside a `Tracker` they cost one attribute read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.core.memory import aten_cpu, aten_cuda  # noqa: F401  (the first registers its rules)
from skimp.core.memory.remembered import memory
from skimp.core.memory.timeline import Timeline
from skimp.core.memory.trace import Trace
from skimp.core.workspace import workspace_bytes

CATEGORIES = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "workspace", "batch")
_DEVICE = torch.ops.prim.device.default
#: A value is read of real tensors only (`core.read`), and nothing is allocated by it.
_READ = torch.ops.aten._local_scalar_dense.default
_active: list[Tracker] = []


@dataclass
class Peak:
    """The fullest moment: bytes in all and by category, and where it was."""

    total: int = 0
    by_category: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    owner: str = ""
    operator: str = ""
    index: int = 0

    def where(self) -> str:
        """'backward, block 3, aten.mm' for a person."""
        return ", ".join(part for part in (self.phase, self.owner, self.operator) if part)


class Tracker(TorchDispatchMode):
    """Count live storages by category while active.

    Args:
        timeline: where to record the bytes by category at every change, for drawing; True for one of its own.
        operators: keep the names of all operators in order, for comparing a simulated step with a real one.
        observer: called with (operator, arguments, result) of every call.
        host_rules: add what ATen's CPU operators allocate inside a call; False when simulating another device.
        trace: where to write every allocation and release, for an allocator's model.
    """

    def __init__(
        self,
        timeline: bool | Timeline = False,
        operators: bool = False,
        host_rules: bool = True,
        observer: Callable[[Any, Any, Any], None] | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__()
        self.observer = observer
        self.host_rules = host_rules
        self.trace = trace
        #: highest bytes at each (phase, owner), and then by category and during which operator.
        self.peaks: dict[tuple[str, str], int] = {}
        self.shares: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
        #: highest bytes at the beginning of each (phase, owner).
        self.starts: dict[tuple[str, str], int] = {}
        self.live = 0
        self.by_category: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self.peak = Peak()
        self.timeline: Timeline | None = Timeline(CATEGORIES) if timeline is True else None
        if isinstance(timeline, Timeline):
            self.timeline = timeline
        self.operators: list[str] | None = [] if operators else None
        self.count = 0
        self.phase = ""
        self.owner = ""
        self.category = "activations"
        self._known: dict[int, tuple[Any, int, str]] = {}
        self._numbers = _SavedNumbers() if host_rules else None

    def __enter__(self) -> Tracker:
        _active.append(self)
        super().__enter__()
        if self._numbers is not None:
            self._numbers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._numbers is not None:
            self._numbers.__exit__(*error)
        super().__exit__(*error)
        _active.remove(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under a tracker; without this torch wraps each dispatch in two more calls."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # More than half of a simulation's dispatches only ask a simulated tensor where it is.
            return args[0].fake_device
        if func is _READ:
            return func(*args)
        kwargs = kwargs or {}
        if FakeTensor in types or not types:
            out = memory.call(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        self.count += 1
        if self.observer is not None:
            self.observer(func, args, out)
        name = func._schema.name
        if self.operators is not None:
            self.operators.append(str(func))
        if isinstance(out, Tensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, Tensor):
                    self._see(item)
        inside = (workspace_bytes if self.host_rules else aten_cuda.workspace)(name, args, kwargs)
        if self.trace is not None:
            self.trace.called(name, inside, self.phase, self.owner)
        place = (self.phase, self.owner)
        if self.live + inside > self.peaks.get(place, 0):
            self.peaks[place] = self.live + inside
            self.shares[place] = ((*self.by_category.values(), inside), name)
        if inside:
            # Outputs and workspace exist together; the workspace is gone when the call returns.
            self._mark(self.live + inside, name, inside)
        elif self.live > self.peak.total:
            self._mark(self.live, name, 0)
        if self.timeline is not None and self.live + inside != self.timeline.last:
            self.timeline.add(self.count, self.by_category, self.live + inside, self.phase, self.owner, name)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._enter(storage, self.category)

    def _enter(self, storage: torch.UntypedStorage, category: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        watch = weakref.ref(storage, partial(self._gone, key))
        self._known[key] = (watch, size, category)
        self.live += size
        self.by_category[category] += size
        if self.trace is not None:
            self.trace.malloc(key, size, self.phase, self.owner)

    def _gone(self, key: int, _: Any) -> None:
        self._leave(key)

    def _leave(self, key: int) -> None:
        _, size, category = self._known.pop(key)
        self.live -= size
        self.by_category[category] -= size
        if self.trace is not None:
            self.trace.free(key, size, self.phase, self.owner)

    def _mark(self, total: int, operator: str, inside: int) -> None:
        if total <= self.peak.total:
            return
        shares = dict(self.by_category)
        shares["workspace"] += inside
        self.peak = Peak(total, shares, self.phase, self.owner, operator, self.count)

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """Register tensors made before or outside (weights, a batch), or move known ones to another category."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                watch, size, old = self._known[key]
                self._known[key] = (watch, size, category)
                self.by_category[old] -= size
                self.by_category[category] += size
            else:
                self._enter(storage, category)
        if self.live > self.peak.total:
            self._mark(self.live, "", 0)
        if self.timeline is not None and self.live != self.timeline.last:
            self.timeline.add(self.count, self.by_category, self.live, self.phase, self.owner)

    def away(self, tensors: Iterable[Tensor]) -> None:
        """These live in another place for now: known, and of no bytes here."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                self._leave(key)
            self._known[key] = (weakref.ref(storage, partial(self._gone, key)), 0, "optimizer")

    def here(self, tensors: Sequence[Tensor], category: str) -> None:
        """These have come back from another place: of a view, the part that it shows."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, tensor.numel() * tensor.itemsize
            self._known.pop(key, None)
            self._known[key] = (weakref.ref(storage, partial(self._gone, key)), size, category)
            self.live += size
            self.by_category[category] += size
            if self.trace is not None:
                self.trace.malloc(key, size, self.phase, self.owner)
        self._mark(self.live, "", 0)

    def at(self, owner: str) -> None:
        """A module is at work from here on."""
        self.owner = owner
        place = (self.phase, owner)
        self.starts[place] = max(self.live, self.starts.get(place, 0))

    def reset_peak(self) -> None:
        """Start the next phase's peak from what is live now."""
        self.peak = Peak(self.live, dict(self.by_category), self.phase, self.owner, "", self.count)
        self.peaks.clear()
        self.shares.clear()
        self.starts.clear()


class _SavedNumbers(TorchFunctionMode):
    """Count the number of a differentiated `x * 0.5`, which autograd keeps until that product's backward.

    torch makes a 0-d tensor of it, 8 bytes; but the dispatcher sees a plain number, and no hook for saved tensors is
    called for it (so recompute does not drop it either). A tensor of the same size is therefore kept beside the
    product's node for as long.
    """

    #: Products and quotients: autograd keeps the other factor. Sums keep nothing.
    KEEPING = frozenset(
        {
            torch.mul,
            torch.div,
            torch.multiply,
            torch.divide,
            torch.true_divide,
            Tensor.mul,
            Tensor.mul_,
            Tensor.div,
            Tensor.div_,
            Tensor.multiply,
            Tensor.divide,
            Tensor.true_divide,
            Tensor.__mul__,
            Tensor.__rmul__,
            Tensor.__imul__,
            Tensor.__truediv__,
            Tensor.__itruediv__,
            Tensor.__rtruediv__,
            Tensor.__div__,
            Tensor.__rdiv__,
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.KEEPING and len(args) == 2 and not isinstance(args[1], Tensor) and torch.is_grad_enabled():
            node = out.grad_fn
            if node is not None:
                kept = [torch.scalar_tensor(args[1], dtype=torch.float64)]
                node.register_hook(lambda *_: kept.clear())
        return out


def current() -> Tracker | None:
    """The innermost active tracker."""
    return _active[-1] if _active else None


def numbers_seen() -> AbstractContextManager[Any]:
    """For forwards that are run again inside backward, where torch has switched function modes off."""
    tracker = current()
    on = any(isinstance(mode, _SavedNumbers) for mode in _get_current_function_mode_stack())
    return nullcontext() if tracker is None or not tracker.host_rules or on else _SavedNumbers()


@contextmanager
def scope(category: str | None = None, phase: str | None = None, owner: str | None = None) -> Iterator[None]:
    """New storages inside are `category`; a peak inside is in `phase`, at `owner`."""
    tracker = current()
    if tracker is None:
        yield
        return
    old = (tracker.category, tracker.phase, tracker.owner)
    tracker.category = category or old[0]
    tracker.phase = phase or old[1]
    tracker.owner = owner if owner is not None else old[2]
    try:
        yield
    finally:
        tracker.category, tracker.phase, tracker.owner = old


def classify(tensors: Iterable[Tensor], category: str) -> None:
    """Move tensors to a category in the active tracker, if there is one: what a gradient hook calls."""
    tracker = current()
    if tracker is not None:
        tracker.hold(tensors, category)


def away(tensors: Iterable[Tensor]) -> None:
    """Tensors that live in another place are of no bytes here, in the active tracker."""
    tracker = current()
    if tracker is not None:
        tracker.away(tensors)


def here(tensors: Sequence[Tensor], category: str) -> None:
    """Tensors that come back for a while."""
    tracker = current()
    if tracker is not None:
        tracker.here(tensors, category)


def at(owner: str) -> None:
    """Say which module is at work, for the peak's address."""
    if _active:
        _active[-1].at(owner)
