"""The sketches of a model learned anew from text: block after block, each block's inputs kept and nothing else.

A row of text goes through one block at a time. First the block's linear layers count the second moments of what they
are given; then each is learned (`core.codecs.sketch_learn`) from its weight as it was before it was coded, which is
read again, one at a time; then the row goes through the block as it is now, and what comes out is what the next block
gets. So a later block is learned for what the sketched blocks before it make, as they will at use. Within a block the
moments are those of the plain sketch it had, not of each layer's learned predecessor.

Memory above the model: `peak_bytes`. Blocks before the present one are passed over in the model's own forward, which is
left after it: whatever it computes beside the blocks (positions, masks) is computed as always.

Source: "Sketch to Adapt: Fine-Tunable Sketches for Efficient LLM Adaptation", Zhang et al., 2025, arXiv 2410.06364,
section 3 (there on 128 sequences of 2,048 tokens); the sequential passes are those of its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.sketch_saved import LEARNED
from skimp.core.attention import declared
from skimp.core.batch import Batch
from skimp.core.codecs.sketch import NUMBERS
from skimp.core.codecs.sketch_learn import learn, output_error
from skimp.core.coded_linear import CodedLinear
from skimp.core.errors import SkimpError
from skimp.core.memory.tracker import scope
from skimp.core.read import read
from skimp.core.structure import Structure


@dataclass(frozen=True)
class Learned:
    """What became of one layer: tr((W - Ŵ) H (W - Ŵ)') over tr(W H W') with the plain sketch, and with the learned."""

    layer: str
    plain: float
    learned: float


class _Left(Exception):
    """Ends a forward after the block that was meant."""


@torch.no_grad()
def calibrate(
    model: nn.Module,
    structure: Structure,
    layers: Iterable[str],
    batches: Sequence[Batch],
    original: Callable[[str], Tensor],
    *,
    power: float = 4.0,
    damping: float = 0.1,
    autocast: bool = False,
) -> list[Learned]:
    """Learn the sketches of `layers`, in place.

    Args:
        model: its linear layers are in codec `sketch`, by plain k-means; no adapter on it. structure: its roles.
        layers: names of coded layers in the model's blocks. batches: one row each.
        original: a layer's weight before it was coded, (outputs, inputs), in the dtype it decodes to.
        power, damping: see `learn`. autocast: products in bfloat16, as training has them.

    Raises:
        SkimpError: no text, or a layer that saw none of it; what `learn` refuses, with the layer's name.
    """
    if not batches:
        raise SkimpError("sketches learned from text", "no rows of text", "", "adapter.calibrate=8")
    wanted, found = list(layers), list[Learned]()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with scope("workspace", "calibrate"):
            rows = _Rows(model, structure, batches, autocast)
            for index, block in enumerate(structure.blocks):
                inside: dict[str, Any] = {
                    name: model.get_submodule(name) for name in wanted if name.startswith(f"{block}.")
                }
                moments = _moments(inside, partial(rows.through, index, False))
                found += _learn(inside, moments, original, power, damping)
                if index + 1 < len(structure.blocks):
                    rows.through(index, True)
    finally:
        for module, training in modes:
            module.training = training
    missed = set(wanted) - {one.layer for one in found}
    if missed:
        raise SkimpError(f"a sketch of {min(missed)} learned from text", "no token went through it", "")
    return found


class _Rows:
    """What every row is on its way from block to block."""

    def __init__(self, model: nn.Module, structure: Structure, batches: Sequence[Batch], autocast: bool) -> None:
        self.base: Any = model.get_submodule(structure.base)
        self.blocks: list[Any] = [model.get_submodule(name) for name in structure.blocks]
        self.batches, self.autocast = batches, autocast
        self.states: list[Tensor | None] = [None] * len(batches)  # before the first block the model makes them itself
        self.alone: list[bool] = [True] * len(self.blocks)  # a block gives a tensor, and no tuple that begins with it

    def through(self, index: int, keep: bool) -> None:
        """Every row through block `index`; with `keep` what comes out is what the next block gets."""
        for row, batch in enumerate(self.batches):
            out = self._forward(batch, index, self.states[row])
            if keep:
                self.states[row] = out

    def _forward(self, batch: Batch, index: int, state: Tensor | None) -> Tensor:
        last: list[Tensor] = []

        def leave(module: Any, args: Any, out: Any) -> None:
            self.alone[index] = isinstance(out, Tensor)
            last.append(out if isinstance(out, Tensor) else out[0])
            raise _Left

        for i, block in enumerate(self.blocks[:index]):
            block.forward = lambda hidden, *a, i=i, **k: self._passed(hidden if i + 1 < index else state, i)
        hook = self.blocks[index].register_forward_hook(leave)
        kind = batch.ids.device.type
        try:
            with declared(batch.documents), torch.autocast(kind, torch.bfloat16, self.autocast, cache_enabled=False):
                self.base(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
        except _Left:
            return last[0]
        finally:
            hook.remove()
            for block in self.blocks[:index]:
                del block.forward
        raise SkimpError("a row of text through the model's blocks", f"block {index} did not run", "", "calibrate: 0")

    def _passed(self, state: Tensor | None, index: int) -> Any:
        return state if self.alone[index] else (state,)


def _moments(layers: dict[str, Any], run: Callable[[], None]) -> dict[str, Tensor]:
    """Mean of x x' over all tokens that a layer was given, (inputs, inputs) float32, of every layer."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def counted(name: str) -> Callable[[Any, Any], None]:
        def hook(module: Any, args: Any) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            if name not in sums:
                sums[name] = x.new_zeros(x.shape[1], x.shape[1])
            sums[name].addmm_(x.t(), x)
            counts[name] = counts.get(name, 0) + x.shape[0]

        return hook

    hooks = [module.register_forward_pre_hook(counted(name)) for name, module in layers.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    for name, total in sums.items():
        total.div_(counts[name])
    return sums


def _learn(
    layers: dict[str, CodedLinear],
    moments: dict[str, Tensor],
    original: Callable[[str], Tensor],
    power: float,
    damping: float,
) -> list[Learned]:
    found = []
    for name in [name for name in layers if name in moments]:
        module, second = layers[name], moments.pop(name)
        weight = original(name)
        whole = read(_error(weight, None, second), expect=1.0) or 1.0
        plain = read(_error(weight, module, second), expect=1.0) / whole
        kept = second.clone()
        try:
            parts = learn(module.codec, weight, second, power=power, damping=damping)
        except SkimpError as error:
            raise SkimpError(f"{name}: {error.asked}", error.found, error.why, error.instead) from error
        for key, value in module.parts().items():
            value.copy_(parts[key])
        setattr(module, LEARNED, True)
        found.append(Learned(name, plain, read(_error(weight, module, kept), expect=1.0) / whole))
    return found


def _error(weight: Tensor, module: CodedLinear | None, second: Tensor) -> Tensor:
    """Error of a layer's outputs, or without a layer their size; a slice of rows at a time."""
    total = second.new_zeros(())
    step = max(1, NUMBERS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        part = weight[start : start + step].float()
        stop = start + part.shape[0]
        seen = torch.zeros_like(part) if module is None else module.weight.rows(start, stop, part.dtype)
        total += output_error(part, seen, second)
    return total


def peak_bytes(
    layers: dict[str, tuple[int, int]], blocks: Sequence[str], tokens: int, rows: int, hidden: int, itemsize: int
) -> int:
    """Bytes above the model while it is calibrated, at most.

    Of every row what goes into a block; of the present block the second moments of its layers, and either what one row
    makes in it (the layers' outputs three times over, attention's among them) or what learning one layer takes: its
    weight, and the factors of its moments, or two of these and a slice of rows in the k-means.

    Args:
        layers: (outputs, inputs) by name. blocks: names. tokens: of a row. rows: of text. itemsize: of a state.
    """
    most = 0
    for block in blocks:
        inside = [shape for name, shape in layers.items() if name.startswith(f"{block}.")]
        moments = sum(4 * n * n for _, n in inside)
        one_row = tokens * (4 * hidden + 3 * sum(m for m, _ in inside)) * max(itemsize, 4)
        learning = max((_learning_bytes(*shape) for shape in inside), default=0)
        most = max(most, moments + max(one_row, learning))
    return rows * tokens * hidden * itemsize + most


def _learning_bytes(outputs: int, inputs: int) -> int:
    square, numbers = inputs * inputs, outputs * inputs
    return 4 * numbers + max(16 * square, 8 * square + SLICE_BYTES * min(numbers, NUMBERS))


#: Of one number in a slice that is clustered: itself three times, its weight, its order, rank and code in int64.
SLICE_BYTES = 48
