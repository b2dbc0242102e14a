"""Which of a run's resting tensors are too small for the tensor pool: they are the C library's, beside its limit."""

from __future__ import annotations

from torch import Tensor

from skimp.run.build import Run


def resting_below(run: Run, size: int) -> int:
    """Bytes of weights, additions and optimizer states in storages of less than `size` bytes each; and of the largest
    region of a mapped file, which comes and goes beside what is allocated."""
    added = [] if run.adapter is None else list(run.adapter.additions())
    away = run.optimizer.away
    held = [(name, value) for name, _, value in run.optimizer.named_state() if isinstance(value, Tensor)]
    states = [value for name, value in held if away is None or not away.holds(name)]
    tensors = [*(p for _, p in run.parameters()), *run.model.buffers(), *added, *states]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(n for n in storages.values() if n < size) + (away.largest if away is not None else 0)
