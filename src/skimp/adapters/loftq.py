"""LoftQ: the codes of a base and a product beside them, fitted to the weight in turn.

Q1 = codes of W, s B1 A1 = the best product of rank r for what they leave over, W - Q1; Q2 = codes of W - s B1 A1, and
so on, `steps` times. The last turn need not be the best (at half the rank of a matrix what is left grows again after
the second or third, at small ranks it falls ever more slowly), so the best is taken: |W - Q - s B A| < |W - Q1| in any
case, where QLoRA begins with the latter. 0 turns are QLoRA itself.

It happens where a layer's codes are made, while its dense weight is there: peak = the result + one layer, and
LAPACK's for a product of rank r of it (`scratch`). Nothing is stored of the codes: whoever needs them again (a resume,
an evaluation, a merged export) loads the dense weight and repeats the turns, with the same operators.

Kept beside A and B is what they began with, A0 and B0, for W + s (B A - B0 A0) alone: what training moved, on the
original weights, a plain LoRA of rank 2 r. As trained it is Q + s B A.

Paper: "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models", Li et al., 2023, arXiv 2310.08659,
section 3, algorithm 1; its factors are s times these, A and B are balanced, and s is in the layer. Its experiments take
5 turns, PEFT 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters import initial
from skimp.adapters.layer import check_ranks, sizes
from skimp.adapters.lora import LoRA
from skimp.adapters.merge import Sums
from skimp.adapters.norms import Pair
from skimp.adapters.spec import Spec
from skimp.adapters.targets import match
from skimp.core.coded import RowCodec
from skimp.core.coded_model import Coder, encode_model
from skimp.core.errors import EffectError
from skimp.core.read import read
from skimp.core.structure import Structure, read_structure


@dataclass(frozen=True)
class Fit:
    """Codes and product of one weight.

    Attributes:
        parts: of the codec. a: (r, inputs), b: (outputs, r); None after 0 turns.
        left: the Frobenius norm of W - Q - s B A after each turn; before them of W - Q1.
        kept: the turn that was taken, from 1.
    """

    parts: Mapping[str, Tensor]
    a: Tensor | None = None
    b: Tensor | None = None
    left: tuple[float, ...] = ()
    kept: int = 0


@torch.no_grad()
def alternate(weight: Tensor, codec: RowCodec, rank: int, scale: float, steps: int) -> Fit:
    """Codes and product of rank `rank`, fitted to `weight` in turn; the best of `steps` turns.

    Args:
        weight: (outputs, inputs), float. Products and norms are in float32, or wider where it is.
        scale: s, which the product has in the layer. steps: turns, 0 for codes alone.

    Raises:
        SkimpError: what the codec refuses (NaN, infinity).
    """
    if steps == 0:
        return Fit(codec.encode(weight))
    whole = weight.to(torch.promote_types(weight.dtype, torch.float32))
    target: Tensor | None = whole
    best, left = Fit({}), []
    for turn in range(1, steps + 1):
        assert target is not None
        parts = codec.encode(target)
        target = None  # before its successor is there
        over = codec.decode(parts, tuple(whole.shape), whole.dtype).neg_().add_(whole)
        if turn == 1:
            left.append(read(torch.linalg.vector_norm(over), expect=1.0))
        a, b = initial.from_base("pissa", over, rank, scale, 0, "")
        left.append(read(torch.linalg.vector_norm(over.addmm_(b, a, alpha=-scale)), expect=1.0))
        if not best.kept or left[-1] < left[best.kept]:
            best = Fit(parts, a, b, (), turn)
        if turn < steps:
            target = torch.addmm(whole, b, a, alpha=-scale, out=over)
        del over, parts, a, b
    return replace(best, left=tuple(left))


def scratch(outputs: int, inputs: int, rank: int, itemsize: int) -> int:
    """Bytes beside the dense weight that `alternate` takes at most: the weight in float32 where it is narrower, what is
    left over, two sets of codes (one byte a weight at most) and factors, and what their making takes."""
    numbers = outputs * inputs
    wide = 0 if itemsize >= 4 else 4 * numbers
    own = 4 * numbers + 2 * numbers + 4 * rank * (outputs + inputs)
    return wide + own + initial.scratch("pissa", outputs, inputs, rank, 4)


class Fitting:
    """What makes one layer's codes in its codec's place, and holds the product for the adapter that comes next.

    Args:
        codec, rank, scale, steps: as `alternate`.
    """

    def __init__(self, codec: RowCodec, rank: int, scale: float, steps: int) -> None:
        self.codec, self.rank, self.scale, self.steps = codec, rank, scale, steps
        self.fit: Fit | None = None

    def __call__(self, weight: Tensor) -> Mapping[str, Tensor]:
        found = alternate(weight, self.codec, self.rank, self.scale, self.steps)
        self.fit = replace(found, parts={})  # the layer has these
        return found.parts


class LoftQ(LoRA):
    """LoRA on a base that was coded for it.

    Args:
        model: its target layers were coded by `coders` and filled since (`on` does all of it).
        spec: `init` "loftq" and `steps`.

    Raises:
        ConflictError: a layer that is dense, or was coded without regard to the product. SkimpError: as `LoRA`.

    Example:
        >>> lora = LoftQ.on(model, NF4(), Spec(r=16, init="loftq", steps=5))
    """

    @classmethod
    def on(cls, model: nn.Module, codec: Any, spec: Spec, structure: Structure | None = None) -> LoftQ:
        """Code a dense model layer by layer and put the adapter on it."""
        structure = structure or read_structure(model)
        encode_model(model, structure, codec, fittings(spec, model, structure, codec))
        return cls(model, spec, structure)

    @classmethod
    def coders(
        cls, asked: Mapping[str, Any], model: nn.Module, structure: Structure, codec: Any
    ) -> Mapping[str, Coder]:
        """One for every target."""
        return {} if codec is None else fittings(Spec.from_recipe(asked, 0), model, structure, codec)

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> Fitted:
        """Q + s B A as trained, or what training moved on the original weights."""
        return Fitted(meta, names, get)

    def peaks(self) -> dict[str, int]:
        """While loading, beside the dense weight as the file has it, as it is computed in, and its codes."""
        most = 0
        for name in self.modules:
            outputs, inputs = sizes(self.module(name))
            own = scratch(outputs, inputs, self.spec.rank_of(name), self.module(name).weight.dtype.itemsize)
            most = max(most, 9 * outputs * inputs + (own if self.spec.steps else 0))
        return {**super().peaks(), "load": most}

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Additions moved, and began with what the codes left over."""
        super().assert_effect(before, after)
        starts = [tensor for layer in self.layers.values() for _, tensor in layer.frozen()]
        if self.spec.steps and not any(read(t.abs().amax(), expect=1.0) > 0.0 for t in starts):
            raise EffectError(
                f"LoftQ on {len(self.modules)} layers", "every product begins at 0", "nothing was fitted to any weight"
            )


def fittings(spec: Spec, model: nn.Module, structure: Structure, codec: Any) -> dict[str, Coder]:
    """Layer -> what makes its codes, for every target of `spec`; the model may be without values.

    Raises:
        TargetError: targets that match nothing, or a rank above a matrix.
    """
    if spec.steps == 0:
        return {}
    names = list(match(model, structure, spec.targets))
    check_ranks(spec, {name: sizes(model.get_submodule(name)) for name in names})
    return {name: Fitting(codec, spec.rank_of(name), spec.factor(name), spec.steps) for name in names}


class Fitted(Sums):
    """A saved LoftQ as changes of weights.

    Attributes:
        coded: the values to change are those that training saw (`seen`); else the original weights, of which what A and
            B began with is no part.
    """

    coded = True

    def seen(self, name: str, rows: Tensor, codec: RowCodec, dtype: torch.dtype) -> Tensor:
        """What training saw in the place of the dense weight `rows` (outputs, inputs): Q, decoded, without product."""
        module, spec = name.removesuffix(".weight"), self.spec
        fit = alternate(rows, codec, spec.rank_of(module), spec.factor(module), spec.steps)
        return codec.decode(fit.parts, tuple(rows.shape), dtype)

    def pairs(self, module: str) -> list[Pair]:
        found = super().pairs(module)
        return found[:1] if self.coded else found
