"""Coded activations: what blocks keep for backward is rounded to 8 or 4 bits, and gradients are of the rounded numbers.

The forward pass is untouched; losses of the first step are the plain run's to the bit. A float32 number that is kept
takes 1 + 8/256 bytes instead of 4 (half of that with 4 bits), off by at most half a step, (largest - smallest) / 510 of
its group of 256 (/ 30 with 4 bits). With 4 bits attention's queries, keys, values and outputs keep 8: an error of a
score is one of its exponential. Statistics (log-sum-exp, norms' scales), parameters and whole numbers stay as they are.

One storage at one version is coded once, however many views of it are kept. A tensor that is changed in place after it
was kept is refused, as autograd would have done. Codes go on to a disk where activations are offloaded.

Papers: "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training", Chen et al., 2021, arXiv
2104.14129, section 4 (per-group quantisation of saved tensors; there rounded at random, here to the nearest);
"GACT: Activation Compressed Training for Generic Network Architectures", Liu et al., 2022, arXiv 2206.11357.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.codecs.affine import GROUP, Affine
from skimp.core.errors import EffectError, OffloadError
from skimp.core.finer import needs_bits
from skimp.core.repeat import rounds
from skimp.core.saved import PLAIN, Saved, Stamps, staying, version_only

#: Numbers of a tensor below which it stays: codes of fewer take as much as they save.
LEAST = 1024
#: Numbers that are coded or decoded at once: 8 MiB in float32, and about four times that on the way.
PIECE = 2**21


class Codes:
    """The numbers of one storage, or of a part of it, at one version; (rows, n) because rows are coded by themselves,
    so that a step's rows give the same codes however they are cut into micro-batches."""

    def __init__(self, source: Tensor, flat: Tensor, bits: int, then: Saved | None) -> None:
        self.codec, self.shape, self.dtype = Affine(bits), flat.shape, flat.dtype
        self.version, self._watch, self._then = source._version, version_only(source), then
        self._last: weakref.ref[Tensor] | None = None
        parts = self._coded(flat)
        self.nbytes = sum(part.nbytes for part in parts.values())
        self._parts = parts if then is None else {name: then.pack(part) for name, part in parts.items()}

    def _pieces(self) -> Iterable[tuple[int, int]]:
        count = self.shape[1]
        for start in rounds(range(0, count, PIECE)):
            yield start, min(start + PIECE, count)

    def _coded(self, flat: Tensor) -> dict[str, Tensor]:
        rows, count = self.shape
        made = {
            name: flat.new_empty((rows, *shape), dtype=dtype)
            for name, (shape, dtype) in self.codec.spec((count,)).items()
        }
        for row in rounds(range(rows)):
            for start, stop in self._pieces():
                for name, part in self.codec.encode(flat[row, start:stop]).items():
                    first = self.codec.spec((start,))[name][0][0]
                    made[name][row, first : first + part.numel()].copy_(part)
        return made

    def decoded(self) -> Tensor:
        """(rows, n) numbers, the same tensor for all who ask while one of them still holds it.

        Raises:
            OffloadError: what was kept has been changed in place since.
        """
        if self._watch is not None and self._watch._version != self.version:
            raise OffloadError(
                f"a tensor of {tuple(self.shape)} numbers as it was kept for backward",
                "it was changed in place afterwards",
                "its gradient would be computed from other numbers than its forward",
                "use the operator that is not in place, or clone the tensor first",
            )
        last = None if self._last is None else self._last()
        if last is not None:
            return last
        parts: dict[str, Tensor] = {
            name: part if isinstance(part, Tensor) else self._then.unpack(part)  # type: ignore[union-attr]
            for name, part in self._parts.items()
        }
        out = parts["codes"].new_empty(tuple(self.shape), dtype=self.dtype)
        for row in rounds(range(self.shape[0])):
            for start, stop in self._pieces():
                cut = {}
                for name, part in parts.items():
                    first, end = (self.codec.spec((n,))[name][0][0] for n in (start, stop))
                    cut[name] = part[row, first:end]
                out[row, start:stop].copy_(self.codec.decode(cut, (stop - start,), self.dtype))
        self._last = weakref.ref(out)
        return out


class Kept:
    """What autograd holds in the place of a tensor."""

    __slots__ = ("codes", "shape", "strides")

    def __init__(self, codes: Codes, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.codes, self.shape, self.strides = codes, tuple(shape), tuple(strides)

    def get(self) -> Tensor:
        return self.codes.decoded().view(-1).as_strided(self.shape, self.strides, 0)


class Coded:
    """Code what the blocks of a model keep; `remove` restores them.

    Args:
        model: any module.
        blocks: fully qualified names of the blocks.
        narrow: numbers a token up to which a tensor is a statistic (one a head, one a row) and stays.
        bits: 8 or 4.

    Attributes:
        then: where the codes go on to, a pipeline of `core.saved`; None keeps them here.
        kept_bytes, coded_bytes: by block, of the tensors that were coded, before and after.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], narrow: int, bits: int = 8) -> None:
        self.blocks, self.narrow, self.bits = tuple(blocks), narrow, bits
        self.then: Saved | None = None
        self.kept_bytes = dict.fromkeys(self.blocks, 0)
        self.coded_bytes = dict.fromkeys(self.blocks, 0)
        self._stamps = Stamps()
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], Codes] = weakref.WeakValueDictionary()
        self._block, self._rows, self._tokens = "", 1, 1
        self._stays: frozenset[int] = frozenset()
        self._modules = [model.get_submodule(name) for name in self.blocks]
        self._under = [module.__dict__.get("forward") for module in self._modules]
        for name, module in zip(self.blocks, self._modules, strict=True):
            self._wrap(name, module)

    def _wrap(self, name: str, module: nn.Module) -> None:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            self._block, self._rows, self._tokens = name, hidden.shape[0], hidden.shape[:-1].numel()
            self._stays = frozenset(t.untyped_storage()._cdata for t in staying(module, args, kwargs))
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return plain(*args, **kwargs)

        module.forward = forward

    def _pack(self, tensor: Tensor) -> Tensor | Kept:
        count = tensor.numel()
        if not tensor.dtype.is_floating_point or type(tensor) not in PLAIN or tensor.layout != torch.strided:
            return tensor
        if count < LEAST or count <= self.narrow * self._tokens or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays:
            return tensor
        dense = _span(tensor) == count
        flat = tensor.detach().as_strided((count,), (1,), tensor.storage_offset()) if dense else tensor.reshape(-1)
        rows = self._rows if count % self._rows == 0 else 1
        bits = 8 if needs_bits() else self.bits
        place = (tensor.storage_offset(), count) if dense else (tensor.shape, tensor.stride(), tensor.storage_offset())
        key = (self._stamps.of(storage), *place, rows, bits, tensor._version)
        codes = self._known.get(key)
        if codes is None:
            with torch.no_grad():
                codes = Codes(tensor, flat.view(rows, -1), bits, self.then)
            self._known[key] = codes
            self.kept_bytes[self._block] += count * tensor.itemsize
            self.coded_bytes[self._block] += codes.nbytes
        strides = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        return Kept(codes, tensor.shape, strides)

    def remove(self) -> None:
        """Restore the blocks' own forward."""
        for module, under in zip(self._modules, self._under, strict=True):
            if under is None:
                del module.forward
            else:
                module.forward = under

    def assert_effect(self, due: Iterable[str] | None = None) -> None:
        """Every block's kept tensors were coded, to fewer bytes.

        Args:
            due: names of blocks that keep anything, when others rest below all that trains; None for all.

        Raises:
            EffectError: names a block that kept all as it was.
        """
        reached = self.blocks if due is None else tuple(due)
        idle = [n for n in reached if not 0 < 10 * self.coded_bytes[n] < 9 * self.kept_bytes[n]]
        if idle:
            kept, coded = self.kept_bytes[idle[0]], self.coded_bytes[idle[0]]
            raise EffectError(
                f"kept tensors of {len(self.blocks)} blocks in {self.bits} bits",
                f"{idle[0]}: {kept:,} bytes were coded to {coded:,}",
                "its activations were kept as they are",
                f"blocks that keep tensors of {LEAST:,} numbers or more, and of more than {GROUP} a row",
            )


def _unpack(kept: Tensor | Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.get()


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
