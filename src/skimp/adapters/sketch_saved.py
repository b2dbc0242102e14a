"""Trained codebooks apart from any model: held against the codes they belong to, as changes of weights.

An adapter is the shifts of grids alone, 4 g K bytes a row in float32. The codes are the base's: a base that is encoded
again gives the same bits, and a checksum of each layer's says when it did not (another base, another number of groups).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skimp.adapters.sketch_linear import moved
from skimp.core.coded import Coded
from skimp.core.coded_linear import PREFIX
from skimp.core.errors import CheckpointError

SHIFT = "sketch_shift"
#: On a layer whose codes were learned from text.
LEARNED = "_skimp_learned"


def sum_of(parts: Mapping[str, Tensor]) -> int:
    """crc32 of one layer's codes, and of its grids after them."""
    total = 0
    for key in ("codes", "grid"):
        total = zlib.crc32(parts[key].detach().cpu().contiguous().numpy().data, total)  # host value: numpy
    return total


def check_codes(name: str, found: int, trained_on: Mapping[str, int] | None) -> None:
    """Refuse codebooks on other codes than theirs.

    Args:
        name: the layer. found: `sum_of` its parts here. trained_on: as the adapter says.

    Raises:
        CheckpointError: they differ.
    """
    expected = (trained_on or {}).get(name)
    if found != expected:
        raise CheckpointError(
            f"trained codebooks on {name}",
            f"codes with checksum {found:08x}" if expected is not None else "a layer they were not trained on",
            "" if expected is None else f"they were trained on {expected:08x}; on other codes they are other weights",
            "the base, the bits and the groups of that time",
        )


class Grids:
    """Saved shifts as changes of weights; see `skimp.adapters.handle.CodedMerging`.

    Args:
        layers: names of the tuned layers. get: reads one saved tensor. meta: the adapter's.
    """

    def __init__(self, layers: Sequence[str], get: Callable[[str], Tensor], meta: Mapping[str, Any]) -> None:
        self.changed = frozenset(f"{name}.weight" for name in layers)
        self._get, self._checksums, self._own = get, meta["codes"], meta["own_codes"]

    def kept(self, name: str, codec: Any, shape: torch.Size, dtype: torch.dtype) -> Coded | None:
        """What a layer was kept in, where the adapter brings its own codes; None: what the codec makes of the base."""
        if not self._own or name not in self.changed:
            return None
        layer = name.removesuffix(".weight")
        return Coded({key: self._get(f"{layer}.{PREFIX}{key}") for key in codec.spec(shape)}, codec, shape, dtype)

    def of_codes(self, name: str, coded: Coded, original: Tensor | None) -> Tensor:
        """(outputs, inputs) float32: what training computed with, or with `original` that weight and the change.

        Raises:
            CheckpointError: the codes are not those that the shifts were trained on.
        """
        layer = name.removesuffix(".weight")
        check_codes(layer, sum_of(coded.parts), self._checksums)
        trained = moved(coded, self._get(f"{layer}.{SHIFT}")).dense(torch.float32)
        if original is None:
            return trained
        return trained.sub_(coded.dense(torch.float32)).add_(original)

    def apply(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """Never: a shift is of codes, and a dense weight has none."""
        raise NotImplementedError(f"{name}: codebooks go through of_codes")
