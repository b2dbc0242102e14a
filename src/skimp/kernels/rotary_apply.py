"""Put the fused rotation into a model whatever its family: where its modules call `apply_rotary_pos_emb`.

HF's attention modules call that function of their own source file. It is exchanged for one that looks at the angles:
those that come from a rotary module of *this* model carry a note and are turned fused; all others, of other models in
the same process, go to the function that was there. It is exchanged only where it computes what
`rotary.rotary_reference` computes, tried on numbers, and put back when the last model that uses it lets go.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from skimp.core.errors import EffectError
from skimp.core.read import read
from skimp.kernels.rotary import fits_native, rotary, rotary_reference

NAME = "apply_rotary_pos_emb"
_NOTE = "_skimp_turned_by"
Apply = Callable[..., tuple[Tensor, Tensor]]


class FusedRotary:
    """The rotary modules of `model` note their angles, and whoever applies them runs fused.

    Attributes:
        modules: how many rotary modules were found and can be served; 0 leaves the model as it was.
        runs, plain_runs: applications of noted angles that ran fused, and that did not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.runs = self.plain_runs = self.modules = 0
        self._changed: list[nn.Module] = []
        files = {type(module).__module__ for module in model.modules()}
        exchanged = [file for file in sorted(files) if _exchange(file)]
        # A model that is dropped without a word lets go as well.
        self._users = [weakref.finalize(self, _put_back, file) for file in exchanged]
        if not exchanged:
            return
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding") and "forward" not in vars(module):
                module.forward = partial(_noted, self, module.forward)  # the model keeps its FusedRotary alive
                self._changed.append(module)
        self.modules = len(self._changed)

    def remove(self) -> None:
        """Modules and functions are as they were."""
        for module in self._changed:
            del module.forward
        self._changed.clear()
        for user in self._users:
            user()

    def assert_effect(self) -> None:
        """Every application ran fused, where there is one at all.

        Raises:
            EffectError: some ran plain, or none ran.
        """
        if self.modules and (self.plain_runs or not self.runs):
            raise EffectError(
                f"{self.modules} rotary modules fused",
                f"{self.runs} applications ran fused, {self.plain_runs} plain",
                "the native form takes float32 heads of even width on a CPU, and angles for every position",
                "leave the fused kernels out (exact.kernels=plain)",
            )

    def apply(self, plain: Apply, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Both rotated; by `plain` where the native form does not take them."""
        if dim == 1 and fits_native(q, cos, sin) and fits_native(k, cos, sin):
            self.runs += 1
            return rotary(q, cos, sin), rotary(k, cos, sin)
        self.plain_runs += 1
        return plain(q, k, cos, sin, unsqueeze_dim=dim)


def _noted(owner: FusedRotary, plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
    angles = plain(*args, **options)
    if isinstance(angles, tuple) and len(angles) == 2:
        setattr(angles[0], _NOTE, owner)
    return angles


class _Exchanged:
    """What stands in a source file's place of `plain`, for so many models."""

    def __init__(self, plain: Apply) -> None:
        self.plain, self.users = plain, 0

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, unsqueeze_dim: int = 1, **options: Any
    ) -> tuple[Tensor, Tensor]:
        owner: FusedRotary | None = getattr(cos, _NOTE, None)
        if owner is None or args or options:
            return self.plain(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **options)
        return owner.apply(self.plain, q, k, cos, sin, unsqueeze_dim)


def _exchange(file: str) -> bool:
    """Exchange the function of a source file, or count one more user; False where there is none or another formula."""
    found = getattr(sys.modules[file], NAME, None)
    if found is None or not (isinstance(found, _Exchanged) or is_plain(found)):
        return False
    if not isinstance(found, _Exchanged):
        found = _Exchanged(found)
        setattr(sys.modules[file], NAME, found)
    found.users += 1
    return True


def _put_back(file: str) -> None:
    found = getattr(sys.modules[file], NAME)
    found.users -= 1
    if not found.users:
        setattr(sys.modules[file], NAME, found.plain)


@lru_cache(maxsize=256)
def is_plain(function: Apply) -> bool:
    """Whether (q, k, cos, sin) are turned as `rotary_reference` turns them, with fewer key heads too."""
    names = list(inspect.signature(function).parameters)
    if names[:4] != ["q", "k", "cos", "sin"] or "unsqueeze_dim" not in names:
        return False
    with _disable_current_modes(), torch.no_grad():
        numbers = torch.arange(2 * 4 * 3 * 8, dtype=torch.float64).sin()
        q, k = numbers.view(2, 4, 3, 8), numbers.flip(0)[:96].view(2, 2, 3, 8)
        cos, sin = numbers[:48].view(2, 3, 8), numbers[48:96].view(2, 3, 8)
        turned = function(q, k, cos, sin)
        gap = max(
            read((a - rotary_reference(b, cos, sin)).abs().max(), expect=0.0)
            for a, b in zip(turned, (q, k), strict=True)
        )
    return gap == 0.0
