"""S2FT on a model: whole attention heads and MLP channels train, as dense slices of frozen layers.

Each chosen layer gets one parameter, `s2ft_delta`: (outputs, k) for columns of o and down, (k, inputs) for rows of v
and up; it begins at 0 and is what the slice has moved (`sliced_linear`). So step 0 is the base to the bit, every update
rule, accumulation and step in backward work as for any parameter, and what is not chosen cannot move.

Memory, P trained numbers in float32 with AdamW: 4 P parameters, 4 P gradients, 8 P moments. Of the inputs of o and down
only the chosen columns are kept for backward, tokens x k; of q, k, v, gate and up nothing unless rows of v or up train.
Llama-3-8B, d=0.03: 0.03 x 14,336 x 32 channels x 4,096 = 56 million numbers.

Paper: "S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity", Yang et al., 2024,
arXiv 2412.06289. Differences: a delta in place of the slice itself, so that decay pulls to the pretrained weights;
query heads of grouped attention are chosen one by one; nothing is moved unless `permute` asks for it, because a
gathered slice trains the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters import permute
from skimp.adapters.handle import Handle, Row
from skimp.adapters.merge import Merged, largest_gap
from skimp.adapters.partial_linear import Where, sliced_linear
from skimp.adapters.s2ft_adapter import SliceAdapter, add_slice, slice_of
from skimp.adapters.s2ft_scores import measured
from skimp.adapters.s2ft_select import KINDS, MEASURED, S2FTSpec, Slice, choose, units_of
from skimp.adapters.targets import adapted, is_transposed
from skimp.core.coded_linear import CodedLinear
from skimp.core.coded_model import refuse_coded
from skimp.core.errors import ConflictError, EffectError
from skimp.core.read import is_simulated, read
from skimp.core.structure import Structure, read_structure

DELTA, INDEX = "s2ft_delta", "s2ft_index"


class S2FT(Handle):
    """The trained slices of one model; the handle that undoes them.

    Args:
        model: an HF causal language model with its weights in place (real or simulated); everything in it is frozen.
        spec: shares and how to choose; with `slices` nothing is chosen.
        structure: the model's roles; read from it when None.
        scores, avoid: see `choose`. waits: scores come later, by `look`; until then nothing trains.

    Attributes:
        slices: layer -> its rows or columns, original numbers in the order of the parameter.

    Raises:
        SkimpError: shares that select nothing, heads that cannot be told apart.
        ConflictError: the model has an adapter already, or coded weights were to be moved.

    Example:
        >>> s2ft = S2FT(model, S2FTSpec(o=0.05, d=0.02))
        >>> optimizer = torch.optim.AdamW(s2ft.parameters(), lr=2e-4)
    """

    name = "s2ft"

    def __init__(
        self,
        model: nn.Module,
        spec: S2FTSpec,
        structure: Structure | None = None,
        scores: Mapping[str, Tensor] | None = None,
        avoid: Sequence[Mapping[str, Slice]] = (),
        waits: bool = False,
    ) -> None:
        self.model = model
        self.structure = structure or read_structure(model)
        slices = dict(spec.slices) or choose(model, self.structure, spec, scores, avoid, waits)
        self.waits = waits and spec.select in MEASURED and not spec.slices
        self._check(slices, spec.permute)
        self._kept: dict[str, Tensor] | None = None
        self._freeze_base()
        self._put(spec, slices)

    @classmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> S2FT:
        keys = (*KINDS, "select", "smallest", "permute", "batches")
        return cls(model, S2FTSpec(**{k: asked[k] for k in keys if k in asked}, seed=seed), structure, waits=True)

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> S2FT:
        return cls(model, S2FTSpec.from_dict({k: v for k, v in meta.items() if k != "name"}), structure)

    @classmethod
    def few(cls, asked: Mapping[str, Any], model: nn.Module, structure: Structure) -> dict[str, Any]:
        """Of each kind as many units in every block as the fullest block has, ranked block by block."""
        spec = S2FTSpec(**{k: asked[k] for k in (*KINDS, "select")}, seed=asked["seed"])
        slices = choose(model, structure, spec, waits=True)
        if spec.select != "random":
            return {}
        changes: dict[str, Any] = {"select": "weight"}
        for kind, blocks in units_of(model, structure, [k for k in KINDS if getattr(spec, k) > 0.0]).items():
            layers = [u for block in blocks for u in block if u.member.module in slices]
            changes[kind] = max(len(slices[u.member.module].index) / (u.size * u.count) for u in layers)
        return changes

    def _check(self, slices: Mapping[str, Slice], permuted: bool) -> None:
        taken = adapted(self.model, self.structure)
        if taken is not None:
            raise ConflictError(
                "S2FT on this model",
                f"{taken} has an adapter",
                "one addition a layer: the second would train on top of the first and be exported without it",
                "merge or detach the first",
            )
        for name in slices:
            weight = self.module(name).weight
            if not weight.dtype.is_floating_point:
                raise ConflictError(
                    f"S2FT on {name}",
                    f"weights of {weight.dtype}",
                    "a slice adds to numbers, and these are codes that skimp did not make",
                    "model.weights=nf4 on a base in floating point: skimp codes it itself",
                )
        coded = [name for name in slices if isinstance(self.module(name), CodedLinear)]
        if permuted and coded:
            raise ConflictError(
                f"permute on {coded[0]}",
                f"weights in codec '{self.module(coded[0]).codec.name}'",
                "blocks of codes share a scale along a row, so columns cannot change places; rows would, but with them",
                "permute=false: the same slices, gathered where they are",
            )

    def _put(self, spec: S2FTSpec, slices: Mapping[str, Slice]) -> None:
        """Attach on these slices; permuted, each index is in the order in which its numbers come to lie."""
        places = self._place(spec, slices)
        for name in self.slices:
            self._attach(name, places[name])

    def _place(self, spec: S2FTSpec, slices: Mapping[str, Slice]) -> dict[str, list[int]]:
        """Take these slices and move what trains side by side where that is asked for; where each number lies now."""
        self._moves: list[permute.Move] = []
        places = {name: list(s.index) for name, s in slices.items()}
        if spec.permute:
            heads = spec.v > 0.0 or spec.o > 0.0
            self._moves = permute.moves(self.model, self.structure, places, heads)
            permute.apply(self.model, self._moves)
            for name, s in slices.items():
                at = permute.places(s.index, self._moves, name)
                pairs = sorted(zip(at, s.index, strict=True))
                places[name] = [place for place, _ in pairs]
                slices = {**slices, name: Slice(s.side, tuple(old for _, old in pairs))}
        self.slices = dict(slices)
        self.spec = replace(spec, slices=self.slices)
        return places

    # ---- chosen on text

    def look(self, rows: Iterable[Any], walk: Callable[[Any], Any], loss: Callable[[Any], Tensor]) -> None:
        """Measure scores on rows of text and take the best units in the place of those that stood for them.

        Raises:
            SkimpError: no row. ConflictError: gradients of weights that are codes.
        """
        if not self.waits:
            return
        # The base alone, as it was: its own forwards, whose weights can have a gradient, and units in their own order.
        self.merged = True
        permute.apply(self.model, self._moves, back=True)
        self._moves = []
        try:
            run = loss if self.spec.select == "gradient" else walk
            scores = measured(self.model, self.spec, rows, run, self.structure)
        finally:
            self.merged = False
        self._take(choose(self.model, self.structure, replace(self.spec, slices={}), scores))

    def adopt(self, meta: Mapping[str, Any]) -> None:
        if self.waits:
            permute.apply(self.model, self._moves, back=True)
            self._take(S2FTSpec.from_dict({k: v for k, v in meta.items() if k != "name"}).slices)

    @torch.no_grad()
    def _take(self, slices: Mapping[str, Slice]) -> None:
        """Other units in as many rows or columns: parameters stay who they are, at 0."""
        for name, places in self._place(self.spec, slices).items():
            index = self.module(name).s2ft_index
            index.copy_(torch.tensor(places, device=index.device))
        self.waits = False

    def _attach(self, name: str, places: list[int]) -> None:
        module, chosen = self.module(name), self.slices[name]
        like, k = module.weight, len(places)
        first, second = like.shape
        outputs, inputs = (second, first) if is_transposed(module) else (first, second)
        shape = (outputs, k) if chosen.side == "columns" else (k, inputs)
        dtype = torch.promote_types(like.dtype, torch.float32)
        module.register_parameter(DELTA, nn.Parameter(torch.zeros(shape, dtype=dtype, device=like.device)))
        # Which units score best is not known before there are values, so no plan could know that they are neighbours.
        if self.spec.select != "random" or places != list(range(places[0], places[0] + k)):
            index = torch.tensor(places, device="cpu" if like.device.type == "meta" else like.device)
            module.register_buffer(INDEX, index.to(like.device), persistent=False)
        module.forward = self._forward(module, chosen, (places[0], places[0] + k))

    def _forward(self, module: Any, chosen: Slice, span: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        plain, transposed, scattered = module.forward, is_transposed(module), INDEX in module._buffers

        def forward(x: Tensor) -> Tensor:
            if self.merged:
                y: Tensor = plain(x)
                return y
            if self.waits and torch.is_grad_enabled() and not is_simulated(x):
                raise ConflictError(
                    f"training S2FT with select={self.spec.select}",
                    "no scores: which units train is not chosen yet",
                    "they are measured on text, with the model's own weights",
                    ["skimp train, which does so before its first step", "S2FT(model, spec, scores=measured(…))"],
                )
            where: Where = module.s2ft_index if scattered else span
            return sliced_linear(
                x, module.weight, module.bias, module.s2ft_delta, where, chosen.side, transposed=transposed
            )

        return forward

    # ---- what there is

    def meta(self) -> dict[str, Any]:
        return {"name": self.name, **self.spec.as_dict()}

    @classmethod
    def merging(
        cls, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor], device: str = "cpu"
    ) -> SliceAdapter:
        slices = S2FTSpec.from_dict({k: v for k, v in meta.items() if k != "name"}).slices
        return SliceAdapter(slices, lambda name: get(f"{name}.{DELTA}").to(device))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name in self.slices:
            yield f"{name}.{DELTA}", self.module(name).s2ft_delta

    def additions(self) -> Iterator[Tensor]:
        for name in self.slices:
            module = self.module(name)
            yield module.s2ft_delta
            if INDEX in module._buffers:
                yield module.s2ft_index

    def table(self) -> list[Row]:
        rows = []
        for name, chosen in self.slices.items():
            module = self.module(name)
            delta = module.s2ft_delta
            first, second = module.weight.shape
            shape = (second, first) if is_transposed(module) else (first, second)
            rows.append(Row(name, chosen.side, shape, len(chosen.index), delta.numel(), delta.nbytes))
        return rows

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        self.check_frozen()
        names = [n for n, _ in self.named_parameters()]
        # A rule that moves some rows a step may miss the numbers that are remembered; a delta begins at 0 everywhere.
        still = [n for n in names if read((before[n] != after[n]).any(), expect=1.0) == 0.0]
        still = [n for n in still if read(self.model.get_parameter(n).detach().abs().amax(), expect=1.0) == 0.0]
        if still:
            raise EffectError(
                f"S2FT on slices of {len(names)} layers",
                f"{len(still)} did not move, first {still[0]}",
                "no gradient reached them: their layers do not run, or their forward was replaced",
            )

    # ---- into the base and out again

    @torch.no_grad()
    def merge(self, keep: bool = False, probe: Callable[[], Tensor] | None = None) -> Merged:
        if self.merged:
            raise ConflictError("merge", "merged already", instead="unmerge first")
        refuse_coded(self.model, self.slices)
        before = None if probe is None else probe().float()
        self._kept = {} if keep else None
        change = lost = 0.0
        for name in self.slices:
            target, index = self._target(name)
            if self._kept is not None:
                self._kept[name] = slice_of(target, self.slices[name].side, index)
            moved, gap = add_slice(target, self.slices[name].side, index, self.module(name).s2ft_delta)
            change, lost = max(change, moved), max(lost, gap)
        self.merged = True
        return Merged(len(self.slices), change, lost, None if before is None else largest_gap(before, probe))

    def _target(self, name: str) -> tuple[Tensor, Tensor]:
        """A layer's weight as (outputs, inputs), and where its slice lies now."""
        module = self.module(name)
        weight = module.weight.t() if is_transposed(module) else module.weight
        at = permute.places(self.slices[name].index, self._moves, name)
        return weight, torch.tensor(at, device=weight.device)

    @torch.no_grad()
    def unmerge(self) -> None:
        if not self.merged:
            raise ConflictError("unmerge", "nothing is merged", instead="merge first")
        for name in self.slices:
            target, index = self._target(name)
            if self._kept is not None:
                slice_of(target, self.slices[name].side, index, self._kept.pop(name))
            else:
                add_slice(target, self.slices[name].side, index, -self.module(name).s2ft_delta)
        self._kept, self.merged = None, False

    @torch.no_grad()
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        if self.merged and self._kept is None:
            raise ConflictError(
                "detach, which restores the base to the bit",
                "merged without a copy of the slices",
                "subtracting a delta leaves rounding behind",
                ["merge(keep=True)", "load the base again", "unmerge() first, if rounding does not matter"],
            )
        if self.merged:
            self.unmerge()
        self._remove()
        self._thaw_base()
        self.slices = {}

    def _remove(self) -> None:
        for name in self.slices:
            module = self.module(name)
            del module.forward
            module._parameters.pop(DELTA)
            module._buffers.pop(INDEX, None)
            module._non_persistent_buffers_set.discard(INDEX)
        permute.apply(self.model, self._moves, back=True)
        self._moves = []

    # ---- adapters of their own

    def extract_adapter(self) -> SliceAdapter:
        """What was trained, by original numbers; copies, which further training does not change."""
        deltas = {name: self.module(name).s2ft_delta.detach().clone() for name in self.slices}
        return SliceAdapter(self.slices, deltas.__getitem__)

    @torch.no_grad()
    def switch(self, adapter: SliceAdapter) -> None:
        """Take this adapter's slices and numbers in place of the present ones, which are lost unless extracted.

        The base is touched by nothing but permutations, so switching there and back is exact to the bit. Parameters
        are new: an optimizer of the old ones must be made again.

        Raises:
            ConflictError: merged.
        """
        if self.merged:
            raise ConflictError("switch", "the present adapter is merged", instead="unmerge first")
        self._remove()
        self._put(replace(self.spec, slices={}), adapter.slices)
        for name in self.slices:
            delta, new = self.module(name).s2ft_delta, adapter.delta(name)
            order = {old: at for at, old in enumerate(adapter.slices[name].index)}
            index = torch.tensor([order[old] for old in self.slices[name].index], device=new.device)
            delta.copy_(new.index_select(1 if self.slices[name].side == "columns" else 0, index))

    def peft(self, base_name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shapes = {row.module: row.shape for row in self.table()}
        transposed = any(is_transposed(self.module(name)) for name in self.slices)
        return self.extract_adapter().peft(base_name, shapes, transposed)
