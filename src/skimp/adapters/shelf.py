"""Several low-rank additions for one base: kept beside it, put on one at a time or as a weighted sum.

The base is never changed, so switching is exact in both directions. A weighted sum of additions is one addition: with
A the A_i one above the other and B the w_i s_i B_i side by side, B A = Σ w_i s_i B_i A_i at rank Σ r_i. It therefore
trains, merges and exports as any other, and costs no product more than its rank says.

Memory: 4 r (inputs + outputs) bytes a layer for each addition on the shelf, once more for what is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.lora import LoRA
from skimp.adapters.lora_peft import plain_parts, widening
from skimp.adapters.merge import A, B
from skimp.adapters.spec import Spec
from skimp.core.errors import ConflictError, SkimpError, did_you_mean
from skimp.core.structure import Structure, read_structure


class Shelf:
    """Additions by name for one model.

    Attributes:
        active: what is on the model, None for the base alone.

    Example:
        >>> shelf = Shelf(model)
        >>> shelf.add("maths", *read_peft("runs/maths/export/peft", model))
        >>> lora = shelf.use({"maths": 0.7, "code": 0.3})
    """

    def __init__(self, model: nn.Module, structure: Structure | None = None) -> None:
        self.model, self.structure = model, structure or read_structure(model)
        self.active: LoRA | None = None
        self._held: dict[str, tuple[Spec, dict[str, Tensor]]] = {}

    def names(self) -> list[str]:
        """What is on the shelf."""
        return list(self._held)

    def add(self, name: str, spec: Spec, tensors: Mapping[str, Tensor]) -> None:
        """Take one up, under a name of its own.

        Args:
            spec, tensors: a plain addition (`taken`, `skimp.export.peft.read_peft`).

        Raises:
            ConflictError: the name is taken, or it trained whole matrices of the base.
        """
        if name in self._held:
            raise ConflictError(f"an adapter '{name}'", "one has that name", instead="another name, or remove it first")
        whole = [n for n in tensors if n.endswith(".weight")]
        if whole:
            raise ConflictError(
                f"adapter '{name}' beside others on one base",
                f"it trained {', '.join(whole)} in full",
                "the others were trained on the base's own",
                "merge it into a base of its own",
            )
        self._held[name] = (spec, {key: value.detach().cpu().clone() for key, value in tensors.items()})

    def remove(self, name: str) -> None:
        """Drop one; what is on the model stays."""
        self._known(name)
        del self._held[name]

    def off(self) -> None:
        """The base alone, to the bit."""
        if self.active is not None:
            self.active.detach()
            self.active = None

    def use(self, which: str | Mapping[str, float]) -> LoRA:
        """Put one on the model, or a weighted sum, in the place of what is there.

        Args:
            which: a name, or names with weights.

        Returns:
            The handle, which trains, merges and exports like any.

        Raises:
            SkimpError: an unknown name, or nothing to sum. ConflictError: a sum with one that scales rows.
        """
        weights = {which: 1.0} if isinstance(which, str) else dict(which)
        for name in weights:
            self._known(name)
        spec, tensors = self._held[which] if isinstance(which, str) else self._sum(weights)
        self.off()
        self.active = LoRA(self.model, spec, self.structure)
        self.active.load(lambda name: tensors[name])
        return self.active

    def _known(self, name: str) -> None:
        if name not in self._held:
            raise SkimpError(f"adapter '{name}'", "not on the shelf", instead=did_you_mean(name, self._held))

    def _sum(self, weights: Mapping[str, float]) -> tuple[Spec, dict[str, Tensor]]:
        if not weights:
            raise SkimpError("a sum of adapters", "none named", instead="off(): the base alone")
        lows: dict[str, list[Tensor]] = {}
        ups: dict[str, list[Tensor]] = {}
        for name, weight in weights.items():
            spec, tensors = self._held[name]
            if spec.reparam != "plain":
                raise ConflictError(
                    f"adapter '{name}' in a sum",
                    f"it scales rows ({spec.reparam})",
                    "scaled rows are no addition: two of them do not add up",
                    "use it alone, or merge it",
                )
            for key in tensors:
                module, _, part = key.rpartition(".")
                if part == A:
                    lows.setdefault(module, []).append(tensors[key])
                    ups.setdefault(module, []).append(weight * spec.factor(module) * tensors[f"{module}.{B}"])
        low = {module: torch.cat(parts) for module, parts in lows.items()}
        found = {f"{module}.{A}": value for module, value in low.items()}
        found |= {f"{module}.{B}": torch.cat(parts, 1) for module, parts in ups.items()}
        ranks = {module: (value.shape[0], float(value.shape[0])) for module, value in low.items()}
        return Spec(r=1, alpha=1.0, targets=tuple(low), ranks=ranks), found


def taken(lora: LoRA) -> tuple[Spec, dict[str, Tensor]]:
    """What is on a model, as a plain addition to its original weights: for `Shelf.add`."""
    wide, high = widening(lora.spec)
    ranks = {name: (wide * lora.spec.rank_of(name), high * lora.spec.alpha_of(name)) for name in lora.modules}
    plain: dict[str, Any] = {"init": "kaiming", "targets": tuple(lora.modules), "ranks": ranks, "name": "lora"}
    spec = Spec.from_dict({**lora.spec.as_dict(), **plain})
    found = {f"{n}.{part}": value for n in lora.modules for part, value in plain_parts(lora.module(n)).items()}
    return spec, found | {f"{name}.weight": lora.module(name).weight for name in lora.full}
