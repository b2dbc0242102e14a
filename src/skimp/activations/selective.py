"""Selective recompute: a block that is run again in backward keeps the results that were dear to make.

Two sets. "attention": the outputs of the attention call, one tensor of the layer's width and a number per row and
head; at length S it costs S multiplications for each number of its output, where a product of the layer costs its
width, so beyond that length it is the dearest thing to make again. "products": the outputs of all matrix products as
well; what is made again is then element-wise (norms, rotary angles, activations), one pass over memory each. Where
norms and activations are fused (`kernels.fused`) the layers behind them do that anyway, and "products" saves nothing.

Exact: the second run reads what the first one wrote, to the bit.

Paper: "Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al., 2022, arXiv 2205.05198,
section 5 (selective activation recomputation keeps all but the attention's inside; with a flash kernel, which keeps no
inside, its output is what is worth keeping).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.core.errors import ModelError
from skimp.core.exact import Keep

#: Operators whose outputs are kept by name; attention calls are known by their name's parts, whatever the device.
PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})


def dear(name: str, keep: Keep) -> bool:
    """Whether an operator's outputs are kept, by its schema's name."""
    attention = "attention" in name and "backward" not in name
    return keep != "nothing" and (attention or (keep == "products" and name in PRODUCTS))


class Kept:
    """What one forward of one block keeps for its second run.

    Two results are not kept and made again where they are needed: the last product (where a block ends with it,
    backward needs nothing behind it and the second run stops before it), and what the block has written over (an
    adapter adds to its layer's product in place).

    Args:
        keep: which results.
        taken: called for each result that a second run takes instead of making it.
    """

    def __init__(self, keep: Keep, taken: Callable[[], None] = lambda: None) -> None:
        self.keep = keep
        self._taken = taken
        self._results: dict[int, tuple[Any, tuple[int, ...]]] = {}

    def first(self) -> AbstractContextManager[Any]:
        """Around the first run: results are noted."""
        return _First(self)

    def again(self) -> AbstractContextManager[Any]:
        """Around the second run: results are handed out in the order they were made, each once.

        A graph that is kept and gone through twice finds nothing the second time, and makes them again.
        """
        return _Again(self)

    def note(self, index: int, out: Any) -> None:
        # Aliases: the outputs themselves get the graph attached, which holds this object.
        kept = _alias(out) if isinstance(out, Tensor) else [_alias(t) if isinstance(t, Tensor) else t for t in out]
        self._results[index] = (kept, tuple(t._version for t in _tensors(kept)))

    def take(self, index: int) -> Any:
        """The result of call `index`, or None where it was not kept.

        Raises:
            ModelError: it was written over after the block had ended.
        """
        found = self._results.pop(index, None)
        if found is None:
            return None
        if _changed(*found):
            raise ModelError(
                f"exact.keep={self.keep}",
                "a kept result was changed in place after its block had ended",
                "the second run of the block would read the changed values",
                "exact.keep=nothing: everything in the block is made again",
            )
        self._taken()
        kept = found[0]
        return kept if isinstance(kept, Tensor) else tuple(kept)

    def ended(self, last_product: int | None) -> None:
        """The first run has ended."""
        self._results = {i: found for i, found in self._results.items() if i != last_product and not _changed(*found)}


def _tensors(kept: Any) -> list[Tensor]:
    return [kept] if isinstance(kept, Tensor) else [t for t in kept if isinstance(t, Tensor)]


def _changed(kept: Any, versions: tuple[int, ...]) -> bool:
    return tuple(t._version for t in _tensors(kept)) != versions


def _alias(tensor: Tensor) -> Tensor:
    """The same storage and the same count of in-place changes, which inside a dispatch is not the default."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Mode(TorchDispatchMode):
    """Counts the calls whose results are dear."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.index = -1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it; torch would wrap each dispatch twice more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not dear(name, self.kept.keep):
            return func(*args, **(kwargs or {}))
        self.index += 1
        return self.dear(name, func, args, kwargs or {})

    def dear(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """One such call."""
        raise NotImplementedError


class _First(_Mode):
    last: int | None = None

    def dear(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.kept.note(self.index, out)
        if name in PRODUCTS:
            self.last = self.index
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.kept.ended(self.last)


class _Again(_Mode):  # type: ignore[no-untyped-call]
    def dear(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        found = self.kept.take(self.index)
        return func(*args, **kwargs) if found is None else found
