"""ReLoRA: a product of low rank goes into the weight every so many steps and begins anew, so that their sum has not.

Before optimizer step k `every` (k = 1, 2, …) each adapted weight becomes W + s B A, A is drawn anew and B is 0: outputs
stay. Moments of both are set to 0 and their steps too, and the learning rate climbs back over `warmup` steps. The rank
of what was added after k restarts is up to (k + 1) r, at the optimizer states of r.

The released code prunes 99.9 % of the moments at random, each moment by a mask of its own, and lets the step count run:
where the first survives and the second does not, the next move is hundreds of times the rate. Here both are exactly 0
and begin a new count.

The base moves, so a checkpoint holds the adapted weights beside A and B; PEFT's form, an addition to the original
weights, does not exist. A coded base is refused: to add to it is to quantise anew.

Paper: "ReLoRA: High-Rank Training Through Low-Rank Updates", Lialin et al., 2023, arXiv 2307.05695, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle
from skimp.adapters.initial import draw
from skimp.adapters.layer import sizes
from skimp.adapters.lora import LoRA
from skimp.adapters.merge import NUMBERS, A, B, add_products
from skimp.adapters.spec import Spec
from skimp.core.coded_model import refuse_coded
from skimp.core.errors import ConflictError, EffectError
from skimp.core.events import Event, Firing, every
from skimp.core.memory.tracker import scope
from skimp.core.read import is_simulated
from skimp.core.structure import Structure


class ReLoRA(LoRA):
    """LoRA whose product goes into the base every `every` optimizer steps.

    Args:
        model, spec, structure: as `LoRA`'s.
        every: optimizer steps between two restarts. warmup: steps over which the rate rises after one.

    Raises:
        ConflictError: a coded base. SkimpError: as `LoRA`.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: Spec | None = None,
        structure: Structure | None = None,
        *,
        every: int = 1000,
        warmup: int = 100,
    ) -> None:
        super().__init__(model, spec or Spec(name="relora"), structure)
        self.every, self.warmup, self.restarts = every, warmup, 0
        refuse_coded(model, self.modules)

    @classmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> ReLoRA:
        """From the keys of a recipe."""
        spec = Spec.from_recipe(asked, seed)
        return cls(model, spec, structure, every=asked["every"], warmup=asked["warmup"])

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> ReLoRA:
        """From what a checkpoint says."""
        own = {key: meta[key] for key in ("every", "warmup")}
        return cls(model, Spec.from_dict({k: v for k, v in meta.items() if k not in own}), structure, **own)

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> Any:
        """The moved weights with the present product in them."""
        return super().merging({k: v for k, v in meta.items() if k not in ("every", "warmup")}, names, get, device)

    def meta(self) -> dict[str, Any]:
        """The spec and when restarts are."""
        return {**super().meta(), "every": self.every, "warmup": self.warmup}

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """A, B and the weights that they went into."""
        yield from super().named_state()
        for name in self.modules:
            yield f"{name}.weight", self.module(name).weight

    def values(self) -> dict[str, Any]:
        """How often it began anew."""
        return {"restarts": self.restarts}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Put it back."""
        self.restarts = int(values["restarts"])

    def events(self, optimizer: Any) -> list[Event]:
        """The restart."""

        def begin_anew(firing: Firing) -> None:
            with scope("workspace", "relora"):
                self.restart(optimizer)

        return [every(self.every, begin_anew, name="relora", moments="reset", warmup=self.warmup)]

    @torch.no_grad()
    def restart(self, optimizer: Any = None) -> None:
        """W += s B A; A anew, B = 0, moments and their steps 0.

        Args:
            optimizer: one of skimp's rules, or None in a loop that resets its own.

        Raises:
            ConflictError: merged. EffectError: the optimizer has no moments of any factor.
        """
        if self.merged:
            raise ConflictError("a restart of ReLoRA", "it is merged", instead="unmerge first")
        self.restarts += 1
        for name, layer in self.layers.items():
            add_products(layer.weight, layer.pairs())
            a, b = layer.module.lora_A, layer.module.lora_B
            if not is_simulated(a):
                rank, inputs = a.shape
                a.copy_(draw(self.spec.init, rank, inputs, self.spec.seed, f"{name}.{A}.{self.restarts}", a))
            b.zero_()
        if optimizer is None:
            return
        factors = [p for layer in self.layers.values() for n, p in layer.trained() if n.endswith((f".{A}", f".{B}"))]
        if not optimizer.reset_moments(factors):
            raise EffectError(
                f"restart {self.restarts} of ReLoRA", "no factor has moments", "they would describe the old product"
            )

    def peaks(self) -> dict[str, int]:
        """Beside what making an addition takes: one layer's product, a slice of rows in float64."""
        most = 0
        for name in self.modules:
            outputs, inputs = sizes(self.module(name))
            rows, rank = min(outputs, max(1, NUMBERS // inputs)), self.spec.rank_of(name)
            most = max(most, 8 * (rows * inputs + rank * inputs + rows * rank), 32 * rank * inputs)
        return {**super().peaks(), "restart": most}

    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """Remove A and B; after a restart the original weights of the adapted modules must be given.

        Raises:
            ConflictError: they are not.
        """
        missing = [name for name in self.modules if f"{name}.weight" not in (base or {})]
        if self.restarts and missing:
            raise ConflictError(
                "detach, which restores the base to the bit",
                f"{self.restarts} restarts have changed {len(self.modules)} weights in place",
                "their originals are not kept: they would take their bytes once more",
                "detach(base={name: original weight})",
            )
        weights = {name: self.module(name).weight for name in self.modules} if self.restarts else {}
        super().detach(base)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_((base or {})[f"{name}.weight"])

    def peft(self, base_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Refused: what was learned is no addition of rank r to the original weights."""
        return Handle.peft(self, base_name)
