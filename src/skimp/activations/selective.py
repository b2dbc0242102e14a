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

    The last product is not kept: where a block ends with it, backward needs nothing behind it and the second run stops
    before it; where something follows, that product is made again.

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
        tensors = [kept] if isinstance(kept, Tensor) else [t for t in kept if isinstance(t, Tensor)]
        self._results[index] = (kept, tuple(t._version for t in tensors))

    def take(self, index: int, name: str) -> Any:
        """The result of call `index`, or None where it was not kept.

        Raises:
            ModelError: the model has written over it since.
        """
        found = self._results.pop(index, None)
        if found is None:
            return None
        kept, versions = found
        tensors = [kept] if isinstance(kept, Tensor) else [t for t in kept if isinstance(t, Tensor)]
        if tuple(t._version for t in tensors) != versions:
            raise ModelError(
                f"exact.keep={self.keep}",
                f"the output of {name} was changed in place after it was made",
                "the second run of the block would read the changed values",
                "exact.keep=nothing: everything in the block is made again",
            )
        self._taken()
        return kept if isinstance(kept, Tensor) else tuple(kept)

    def drop_last_product(self, index: int | None) -> None:
        if index is not None:
            self._results.pop(index, None)


def _alias(tensor: Tensor) -> Tensor:
    """The same storage and the same count of in-place changes, which inside a dispatch is not the default."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _First(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept
        self.index = 0
        self.last: int | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it; torch would wrap each dispatch twice more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if dear(name, self.kept.keep):
            self.kept.note(self.index, out)
            if name in PRODUCTS:
                self.last = self.index
            self.index += 1
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.kept.drop_last_product(self.last)


class _Again(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept
        self.index = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if dear(name, self.kept.keep):
            found = self.kept.take(self.index, name)
            self.index += 1
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))
