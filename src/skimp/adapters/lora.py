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

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.dropout import dropout_here
from skimp.adapters.handle import Handle, Merging, Row
from skimp.adapters.linear import lora_linear
from skimp.adapters.lora_peft import config_of, tensors_of
from skimp.adapters.merge import A, B, Merged, Sums, add_product, largest_gap
from skimp.adapters.spec import ALL_LINEAR, Spec
from skimp.adapters.targets import is_transposed, match
from skimp.core import noise
from skimp.core.coded import without_values
from skimp.core.coded_model import refuse_coded
from skimp.core.errors import ConflictError, EffectError
from skimp.core.position import recording
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
        full: names of modules trained in full.

    Raises:
        TargetError: targets that match nothing or only in part.
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
        taken = next((n for n, m in model.named_modules() if A in m._parameters), None)
        if taken is not None:
            raise ConflictError(
                "a LoRA adapter on this model",
                f"{taken} has one",
                "one addition a layer: the second would train on top of the first and be exported without it",
                "merge or detach the first",
            )
        self.modules = match(model, self.structure, self.spec.targets)
        self.full = self._full()
        self.scale = {name: self.spec.factor(name) for name in self.modules}
        self._trained = {name: p.requires_grad for name, p in model.named_parameters()}
        self._kept: dict[str, Tensor] | None = None
        self.merged = False
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name in self.full:
            self.module(name).weight.requires_grad_(True)
        for name in self.modules:
            self._attach(name)

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

    def _attach(self, name: str) -> None:
        module = self.module(name)
        outputs, inputs = sizes(module)
        rank, like = self.spec.rank_of(name), module.weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        a = torch.empty(rank, inputs, dtype=dtype, device=like.device)
        b = torch.zeros(outputs, rank, dtype=dtype, device=like.device)
        if not without_values(like):
            self._draw(a, f"{name}.{A}")
        module.register_parameter(A, nn.Parameter(a))
        module.register_parameter(B, nn.Parameter(b))
        module.forward = self._forward(name, module)

    def _draw(self, a: Tensor, name: str) -> None:
        """A's first numbers: a function of (seed, name), not of what was drawn before."""
        rank, inputs = a.shape
        with torch.no_grad():
            if self.spec.init == "gaussian":
                drawn = noise.normal(self.spec.seed, name, 0, a.numel(), device=a.device).mul_(1.0 / rank)
            else:
                drawn = noise.uniform(self.spec.seed, name, 0, a.numel(), device=a.device)
                drawn.sub_(0.5).mul_(2.0 / math.sqrt(inputs))
            a.copy_(drawn.view(rank, inputs))

    def _forward(self, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        scale, transposed, plain, spec = self.scale[name], is_transposed(module), module.forward, self.spec

        def forward(x: Tensor) -> Tensor:
            if self.merged:
                y: Tensor = plain(x)
                return y
            dropped = spec.dropout > 0.0 and module.training and recording()
            return lora_linear(
                x,
                module.weight,
                module.bias,
                module.lora_A,
                module.lora_B,
                scale,
                transposed=transposed,
                dropout=dropout_here(spec.dropout, spec.seed, name, x) if dropped else None,
            )

        #: Read where a forward is run again by others, who may not know its place.
        forward.dropout = spec.dropout  # type: ignore[attr-defined]
        return forward

    # ---- what is trained

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything trained, by the name it has in the model."""
        for name in self.full:
            yield f"{name}.weight", self.module(name).weight
        for name in self.modules:
            module = self.module(name)
            yield f"{name}.{A}", module.lora_A
            yield f"{name}.{B}", module.lora_B

    def additions(self) -> Iterator[Tensor]:
        """A and B of every adapted module."""
        return (p for n, p in self.named_parameters() if n.endswith((f".{A}", f".{B}")))

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
            a, b = self.module(name).lora_A, self.module(name).lora_B
            outputs_inputs = (b.shape[0], a.shape[1])
            number, size = a.numel() + b.numel(), a.nbytes + b.nbytes
            rows.append(Row(name, target, outputs_inputs, a.shape[0], number, size))
        return rows

    def _parts(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """W as (outputs, inputs), A and B of one module."""
        module = self.module(name)
        weight = module.weight.t() if is_transposed(module) else module.weight
        return weight, module.lora_A, module.lora_B

    # ---- into the base and out again

    @torch.no_grad()
    def merge(self, keep: bool = False, probe: Callable[[], Tensor] | None = None) -> Merged:
        """Add s B A to each weight, in float32 at least, one layer at a time; forwards are the base's own from then on.

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
        self._kept = {} if keep else None
        change = gap = 0.0
        for name in self.modules:
            module = self.module(name)
            if self._kept is not None:
                self._kept[name] = module.weight.detach().clone()
            moved, lost = add_product(*self._parts(name), self.scale[name])
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
        for name in self.modules:
            module = self.module(name)
            if self._kept is not None:
                module.weight.copy_(self._kept.pop(name))
            else:
                add_product(*self._parts(name), -self.scale[name])
        self._kept, self.merged = None, False

    @torch.no_grad()
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """Remove the additions; the model is the base again, to the bit, and trains what it trained before.

        Args:
            base: the original weights of modules trained in full, by parameter name; needed when there are any.

        Raises:
            ConflictError: merged without `keep`, or the originals of fully trained modules are not given.
        """
        if self.merged and self._kept is None:
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
        for name in self.modules:
            module = self.module(name)
            del module.forward
            module._parameters.pop(A)
            module._parameters.pop(B)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self._trained[name])
        self.modules = {}

    def peft(self, base_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A plain LoRA of PEFT's."""
        return config_of(self, base_name), tensors_of(self)

    def asleep(self) -> frozenset[str]:
        """A's gradient holds B, which begins at 0."""
        return frozenset(f"{name}.{part}" for name in self.modules for part in (A, B))

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Every addition moved in the first step: B, whose gradient is not 0 there, or A.

        Args:
            before, after: numbers of each named parameter around the step.

        Raises:
            EffectError: names the additions that did not, or a base weight that trains.
        """
        self.check_frozen()
        still = [name for name in self.modules if not any(_differ(before, after, f"{name}.{part}") for part in (A, B))]
        if still:
            raise EffectError(
                f"additions on {len(self.modules)} layers",
                f"{len(still)} did not move, first {still[0]}",
                "no gradient reached them: their layers do not run, or their forward was replaced",
            )


def sizes(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, however it stores its weight."""
    first, second = module.weight.shape
    return (second, first) if is_transposed(module) else (first, second)


def few_blocks(spec: Spec, model: nn.Module, structure: Structure) -> dict[str, Any]:
    """Keys of a recipe that put what any block gets on every block, at the largest rank; none where all are alike."""
    wanted, inside = [], {index: set[str]() for index in range(len(structure.blocks))}
    for name in match(model, structure, spec.targets):
        index = structure.block_of(name)
        wanted.append(name if index is None else name[len(structure.blocks[index]) + 1 :])
        if index is not None:
            inside[index].add(wanted[-1])
    if not spec.ranks and all(names == inside[0] for names in inside.values()):
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
    return name.endswith((f".{A}", f".{B}"))


def _differ(before: Mapping[str, Tensor], after: Mapping[str, Tensor], name: str) -> bool:
    return read((before[name] != after[name]).any(), expect=1.0) != 0.0
