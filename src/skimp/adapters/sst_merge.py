"""A saved spectral model as plain weights: each layer multiplied out when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from skimp.adapters.sst_sample import dense


class Spectra:
    """See `skimp.adapters.handle.Merging`.

    Args:
        layers: names of the spectral layers. get: reads one saved tensor.
    """

    def __init__(self, layers: Sequence[str], get: Callable[[str], Tensor]) -> None:
        self.changed = frozenset(f"{name}.weight" for name in layers)
        self._get = get

    def apply(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """The product of the saved factors; nothing of `value` is left."""
        layer = name.removesuffix(".weight")
        left, right, sigma, order = (self._get(f"{layer}.sst_{key}") for key in ("left", "right", "sigma", "order"))
        whole = dense(left, right, sigma, order)
        return value.copy_(whole.t() if transposed else whole)
