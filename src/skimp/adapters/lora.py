"""LoRA on a model: attach, look, merge, detach. Reversible, and usable in any training loop.

Each chosen linear layer gets two parameters of its own, `lora_A` (r, inputs) and `lora_B` (outputs, r), and a forward
that adds s B A x (`lora_linear`). The layer stays the module it was, with its weight under its name, frozen; so
checkpoints of the base, recompute, fused layers and sharding see the model they know.

Memory per layer, float32 with AdamW: 4 r (inputs + outputs) bytes of parameters, as much of gradients and twice as much
of moments. SmolLM2-135M, r = 16 on all 210 linear layers: 4,884,480 numbers, 20 + 20 + 39 MB; the model itself would
take 538 + 1076 MB for the last two. Activations are not reduced.

A and B are float32 beside a half-precision base: a bfloat16 number near 0.05 has steps of 2e-4, and an update of 1e-4
would vanish.

Paper: "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021, arXiv 2106.09685, sections 4.1 and 4.2;
scale "rslora": "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", Kalajdzievski, 2023, arXiv 2312.03732.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle, Merging, Row
from skimp.adapters.layer import LowRank, check_ranks, sizes
from skimp.adapters.lora_peft import config_of, tensors_of
from skimp.adapters.merge import MAGNITUDE, A, B, Merged, Sums, largest_gap
from skimp.adapters.spec import ALL_LINEAR, Spec
from skimp.adapters.targets import adapted, match
from skimp.core.coded_model import refuse_coded
from skimp.core.errors import ConflictError, EffectError
from skimp.core.read import read
from skimp.core.structure import Structure, read_structure


class LoRA(Handle):
    """The additions of one model; the handle that undoes them.

    Args:
        model: an HF causal language model with its weights in place (real or simulated). Everything in it is frozen but
            the additions and what `spec` trains in full.
        spec: rank, targets and the rest.
        structure: the model's roles; read from it when None.

    Attributes:
        modules: adapted module name -> the target it matched.
        layers: adapted module name -> its addition.
        full: names of modules trained in full.

    Raises:
        TargetError: targets that match nothing or only in part, or a rank above a matrix.
        ConflictError: the model has additions already.

    Example:
        >>> lora = LoRA(model, Spec(r=16, targets=("q_proj", "v_proj")))
        >>> optimizer = torch.optim.AdamW(lora.parameters(), lr=2e-4)
    """

    name = "lora"

    def __init__(self, model: nn.Module, spec: Spec | None = None, structure: Structure | None = None) -> None:
        self.model = model
        self.spec = spec or Spec()
        self.structure = structure or read_structure(model)
        taken = adapted(model, self.structure)
        if taken is not None:
            raise ConflictError(
                "a LoRA adapter on this model",
                f"{taken} has one",
                "one addition a layer: the second would train on top of the first and be exported without it",
                "merge or detach the first",
            )
        self.modules = match(model, self.structure, self.spec.targets)
        self.full = self._full()
        self.name = self.spec.name
        check_ranks(self.spec, {name: sizes(self.module(name)) for name in self.modules})
        self.scale = {name: self.spec.factor(name) for name in self.modules}
        self.merged = False
        self._freeze_base()
        for name in self.full:
            self.module(name).weight.requires_grad_(True)
        self.layers = {name: LowRank(name, self.module(name), self.spec) for name in self.modules}

    def _full(self) -> tuple[str, ...]:
        """Names of the modules trained in full; a tied pair is one matrix, under the embedding's name."""
        s, spec = self.structure, self.spec
        if s.tied:
            return (s.embedding,) if spec.embeddings or spec.head else ()
        return tuple(n for n, wanted in ((s.embedding, spec.embeddings), (s.head, spec.head)) if wanted)

    @classmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> LoRA:
        """From the keys of a recipe."""
        return cls(model, Spec.from_recipe(asked, seed), structure)

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> LoRA:
        """From what a checkpoint says."""
        return cls(model, Spec.from_dict(meta), structure)

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> Merging:
        """W + s B A of every adapted weight."""
        return Sums(meta, names, get)

    @classmethod
    def few(cls, asked: Mapping[str, Any], model: nn.Module, structure: Structure) -> dict[str, Any]:
        """Targets that any block has, in all of them."""
        if asked["targets"] == ALL_LINEAR:
            return {}
        return few_blocks(Spec.from_recipe(asked, 0), model, structure)

    def meta(self) -> dict[str, Any]:
        """The spec."""
        return self.spec.as_dict()

    # ---- what is trained

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything trained, by the name it has in the model."""
        for name in self.full:
            yield f"{name}.weight", self.module(name).weight
        for layer in self.layers.values():
            yield from layer.trained()

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """What trains, and what it began with where that was the base."""
        yield from self.named_parameters()
        for layer in self.layers.values():
            yield from layer.frozen()

    def additions(self) -> Iterator[Tensor]:
        """Everything beside the base."""
        for layer in self.layers.values():
            yield from (tensor for _, tensor in (*layer.trained(), *layer.frozen()))

    def base(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Named parameters of the frozen base, tied ones once."""
        return ((n, p) for n, p in self.model.named_parameters() if not p.requires_grad and not _is_addition(n))

    def table(self) -> list[Row]:
        """One row a module, fully trained ones first."""
        rows = []
        for name in self.full:
            weight = self.module(name).weight
            tied = f" (tied with {self.structure.head})" if self.structure.tied else ""
            rows.append(Row(name, f"in full{tied}", tuple(weight.shape), 0, weight.numel(), weight.nbytes))
        for name, target in self.modules.items():
            trained = [p for _, p in self.layers[name].trained()]
            number, size = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
            rows.append(Row(name, target, sizes(self.module(name)), self.spec.rank_of(name), number, size))
        return rows

    def lr_scale(self, name: str) -> float:
        """LoRA+: B and the norms move `ratio` times as fast as A."""
        return self.spec.ratio if name.endswith((f".{B}", f".{MAGNITUDE}")) else 1.0

    def peaks(self) -> dict[str, int]:
        """Beside the finished model: what making one addition takes."""
        return {"attach": max((layer.scratch() for layer in self.layers.values()), default=0)}

    # ---- into the base and out again

    @torch.no_grad()
    def merge(self, keep: bool = False, probe: Callable[[], Tensor] | None = None) -> Merged:
        """Add the product to each weight, in float32 at least, one layer at a time, and scale its rows where they have
        trained norms; forwards are the base's own from then on.

        Args:
            keep: hold a copy of every changed weight, so that `unmerge` and `detach` restore it to the bit; as many
                bytes as the changed weights. Without it `unmerge` subtracts, which is right to rounding.
            probe: gives logits of a few tokens; run before and after for the largest difference.

        Returns:
            What was measured.

        Raises:
            ConflictError: merged already.
        """
        if self.merged:
            raise ConflictError("merge", "merged already", instead="unmerge first")
        refuse_coded(self.model, self.modules)
        before = None if probe is None else probe().float()
        change = gap = 0.0
        for layer in self.layers.values():
            moved, lost = layer.merge(keep)
            change, gap = max(change, moved), max(gap, lost)
        self.merged = True
        return Merged(len(self.modules), change, gap, None if before is None else largest_gap(before, probe))

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take s B A out again: to the bit after `merge(keep=True)`, else by subtraction.

        Raises:
            ConflictError: not merged.
        """
        if not self.merged:
            raise ConflictError("unmerge", "nothing is merged", instead="merge first")
        for layer in self.layers.values():
            layer.unmerge()
        self.merged = False

    @torch.no_grad()
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """Remove the additions; the model is the base again, to the bit, and trains what it trained before.

        Args:
            base: the original weights of modules trained in full, by parameter name; needed when there are any.

        Raises:
            ConflictError: merged without `keep`, or the originals of fully trained modules are not given.
        """
        if self.merged and not all(layer.kept for layer in self.layers.values()):
            raise ConflictError(
                "detach, which restores the base to the bit",
                "merged without a copy of the base",
                "subtracting s B A leaves rounding behind",
                ["merge(keep=True)", "load the base again", "unmerge() first, if rounding does not matter"],
            )
        missing = [f"{n}.weight" for n in self.full if f"{n}.weight" not in (base or {})]
        if missing:
            raise ConflictError(
                "detach, which restores the base to the bit",
                f"{', '.join(missing)} trained in full, in place",
                "its original is not kept: it would take its bytes once more",
                "detach(base={name: original weight})",
            )
        if self.merged:
            self.unmerge()
        for name in self.full:
            self.module(name).weight.copy_((base or {})[f"{name}.weight"])
        for layer in self.layers.values():
            layer.remove()
        self._thaw_base()
        self.modules, self.layers = {}, {}

    def peft(self, base_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A plain LoRA of PEFT's."""
        return config_of(self, base_name), tensors_of(self)

    def asleep(self) -> frozenset[str]:
        """A's gradient holds B, which may begin at 0."""
        return frozenset(name for layer in self.layers.values() for name, _ in layer.trained())

    def still(self) -> frozenset[str]:
        """A wherever B begins at 0: its gradient is a product with B."""
        return frozenset() if self.spec.keeps_start else frozenset(f"{name}.{A}" for name in self.layers)

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Every addition moved in the first step: B, whose gradient is not 0 there, or A; A as well where both began
        from W, and the norms where rows have some.

        Args:
            before, after: numbers of each named parameter around the step.

        Raises:
            EffectError: names the additions that did not, or a base weight that trains.
        """
        self.check_frozen()
        asked = f"adapter '{self.name}': additions on {len(self.modules)} layers"
        still = [n for n in self.modules if not any(_differ(before, after, f"{n}.{part}") for part in (A, B))]
        if still:
            raise EffectError(
                asked,
                f"{len(still)} did not move, first {still[0]}",
                "no gradient reached them: their layers do not run, or their forward was replaced",
            )
        more = [(A, "begins beside a B that is not 0")] if self.spec.keeps_start else []
        more += [(MAGNITUDE, "scales every row")] if self.spec.reparam != "plain" else []
        for part, why in more:
            if not any(_differ(before, after, f"{name}.{part}") for name in self.modules):
                raise EffectError(asked, f"no {part} moved", f"it {why}, so it has a gradient")


def few_blocks(spec: Spec, model: nn.Module, structure: Structure, saved: bool = False) -> dict[str, Any]:
    """Keys of a recipe that put what any block gets on every block, at the largest rank; none where all are alike, but
    of a `saved` adapter, whose keys the recipe does not have."""
    wanted, inside = [], {index: set[str]() for index in range(len(structure.blocks))}
    for name in match(model, structure, spec.targets):
        index = structure.block_of(name)
        wanted.append(name if index is None else name[len(structure.blocks[index]) + 1 :])
        if index is not None:
            inside[index].add(wanted[-1])
    if not saved and not spec.ranks and all(names == inside[0] for names in inside.values()):
        return {}
    return {
        "targets": tuple(dict.fromkeys(wanted)),
        "r": max([spec.r, *(rank for rank, _ in spec.ranks.values())]),
        "alpha": spec.alpha,
        "scale": spec.scale,
        "init": spec.init,
        "embeddings": spec.embeddings,
        "head": spec.head,
    }


def _is_addition(name: str) -> bool:
    return name.endswith((f".{A}", f".{B}", f".{MAGNITUDE}"))


def _differ(before: Mapping[str, Tensor], after: Mapping[str, Tensor], name: str) -> bool:
    return read((before[name] != after[name]).any(), expect=1.0) != 0.0
