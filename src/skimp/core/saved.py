"""The one pipeline for tensors kept for backward that wait somewhere else: identity, tier, policy.

*Identity.* What is stored is a storage at a version, once, however many views of it backward keeps: an entry's name
is a stamp given to the storage when it is first seen (an address is used again as soon as it is freed), the span of
bytes and the version. A tensor that is a small part of its storage takes its own span along and not the whole.

*Policy.* Tensors belong to the group (the block) whose forward kept them. A group is written while the next one
computes and given up when that one is over; it is read back while the group after it is in backward. So at most two
groups are in memory at any time, at moments that depend on nothing but the order of the computation: a simulation
takes the same path and knows the bytes.

*Safety.* What is not given up yet is handed back as it is, nothing is read. A tensor that is changed in place after it
was kept is refused as autograd would have refused it. A graph that is dropped, by a finished backward or an exception,
drops its entries; a graph that is kept can be run again. Copies under way are waited for before their memory goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from skimp.core.errors import OffloadError
from skimp.core.tiers import Extent, Pending, Tier

#: Bytes below which a tensor stays: a page.
LEAST = 4096
#: Spans begin at multiples of this, so that a tensor that comes back is aligned as it was.
LINE = 64
#: Types whose bytes are all in their storage.
PLAIN = (Tensor, nn.Parameter, FakeTensor)

#: What exchanges a tensor's bytes and keeps its version counter. Only for a tensor that is no one's (`version_only`).
_BYTES: Any = vars(torch._C.TensorBase)["data"]


class Entry:
    """One storage, or a span of it, at one version."""

    def __init__(self, tier: Tier, source: Tensor, start: int, nbytes: int) -> None:
        self.tier, self.start, self.nbytes = tier, start, nbytes
        self.device = source.device
        self.version = source._version
        self._watch = version_only(source)
        self._pending: Pending | None = None
        self.extent: Extent | None = None
        self.extent = tier.reserve(nbytes)
        #: the tensor itself until its bytes are away, the bytes when they are back.
        self.source: Tensor | None = source
        self.loaded: Tensor | None = None
        self._pending = tier.store(self.extent, source.untyped_storage(), start)
        self.kept: list[weakref.ref[Kept]] = []

    def leave(self) -> None:
        """The bytes are away: let the tensor go."""
        if self.source is None:
            return
        self._finish()
        for one in self.kept:
            kept = one()
            if kept is not None:
                kept.tensor = None
        self.kept.clear()
        self.source = None

    def come_back(self) -> None:
        """Begin to read the bytes, unless they are here or coming."""
        if self.source is None and self.loaded is None:
            assert self.extent is not None
            self.loaded = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            self._pending = self.tier.fetch(self.extent, self.loaded.untyped_storage())

    def bytes_here(self) -> Tensor:
        """The bytes, waited for."""
        self.come_back()
        self._finish()
        assert self.loaded is not None
        return self.loaded

    def abandon(self) -> None:
        """As `leave`, for a step that is given up: nobody will ask for the bytes, whether they arrived or not."""
        pending, self._pending = self._pending, None
        _ended(pending)
        self.leave()

    def drop(self) -> None:
        """Give up what came back; it is still away."""
        if self.loaded is not None:
            self._finish()
            self.loaded = None

    def unchanged(self) -> bool:
        """Whether the tensor is what it was when it was kept; true when nothing is left of it to be changed."""
        return self._watch is None or self._watch._version == self.version

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def __del__(self) -> None:
        if self.extent is None:  # no room was found for it
            return
        _ended(self._pending)
        self.tier.release(self.extent)


class Kept:
    """What autograd holds in the place of a tensor: how to make it from its entry."""

    __slots__ = ("__weakref__", "dtype", "entry", "offset", "shape", "strides", "tensor")

    def __init__(self, entry: Entry, tensor: Tensor) -> None:
        self.entry = entry
        self.dtype, self.shape, self.strides = tensor.dtype, tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset() - entry.start // tensor.itemsize
        self.tensor: Tensor | None = None
        if entry.source is not None:
            self.tensor = tensor
            entry.kept.append(weakref.ref(self))

    def get(self) -> Tensor:
        """The tensor, to the bit.

        Raises:
            OffloadError: it was changed in place since.
        """
        if not self.entry.unchanged():
            raise OffloadError(
                f"a tensor of shape {tuple(self.shape)} as it was kept for backward",
                "it was changed in place afterwards",
                "its gradient would be computed from other numbers than its forward",
                "use the operator that is not in place, or clone the tensor first",
            )
        if self.tensor is not None:
            return self.tensor
        data = self.entry.bytes_here()
        whole = data.numel() // self.dtype.itemsize * self.dtype.itemsize
        return data[:whole].view(self.dtype).as_strided(self.shape, self.strides, self.offset)


class Group:
    """The entries of one block in one forward."""

    def __init__(self) -> None:
        self._entries: list[weakref.ref[Entry]] = []

    def add(self, entry: Entry) -> None:
        self._entries.append(weakref.ref(entry))

    def entries(self) -> list[Entry]:
        """Those that backward still needs."""
        return [entry for one in self._entries if (entry := one()) is not None]


class Saved:
    """The pipeline: `begin` and `end` around each block's forward, `backward` when its gradient has come.

    Args:
        tier: where the bytes wait.
        least: tensors of fewer bytes stay.

    Attributes:
        stored, forwarded, fetched: how many entries were written, handed back before they had gone, and read.
    """

    def __init__(self, tier: Tier, least: int = LEAST) -> None:
        self.tier, self.least = tier, least
        self.stored = self.forwarded = self.fetched = 0
        self._stamps = Stamps()
        self._entries: weakref.WeakValueDictionary[tuple[int, ...], Entry] = weakref.WeakValueDictionary()
        self._leaving: list[list[Entry]] = []
        self._back: list[Group] = []
        self._group: Group | None = None
        self._stays: frozenset[int] = frozenset()

    # ---- forward

    def begin(self, stay: Iterable[Tensor]) -> Group:
        """A block's forward begins: what it keeps is a new group, but for `stay`, tensors that never leave
        (parameters, buffers, what all blocks share)."""
        self._group = Group()
        self._stays = frozenset(t.untyped_storage()._cdata for t in stay)
        self._leaving.append([])
        return self._group

    def end(self, all_leave: bool) -> None:
        """A block's forward is over: the group before it is given up; its own too if `all_leave`."""
        self._group = None
        keep = 0 if all_leave else 1
        while len(self._leaving) > keep:
            for entry in self._leaving.pop(0):
                entry.leave()

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """What autograd keeps for `tensor`: the hook of `torch.autograd.graph.saved_tensors_hooks`."""
        group, span = self._group, _span(tensor)
        if group is None or span < self.least or type(tensor) not in PLAIN:
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            return tensor  # its numbers are not those of its storage
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays:
            return tensor
        start, nbytes = 0, int(storage.nbytes())
        if nbytes > 2 * span:
            first = int(tensor.storage_offset()) * tensor.itemsize
            start = first // LINE * LINE
            nbytes = first + span - start
        key = (self._stamps.of(storage), start, nbytes, tensor._version)
        entry = self._entries.get(key)
        if entry is None:
            entry = Entry(self.tier, tensor, start, nbytes)
            self._entries[key] = entry
            self._leaving[-1].append(entry)
            self.stored += 1
        group.add(entry)
        return Kept(entry, tensor)

    def unpack(self, kept: Tensor | Kept) -> Tensor:
        """The tensor that `pack` was given."""
        if isinstance(kept, Tensor):
            return kept
        if kept.tensor is not None:
            self.forwarded += 1
        elif kept.entry.loaded is None:
            self.fetched += 1
        return kept.get()

    # ---- backward

    def backward(self, group: Group | None, before: Group | None) -> None:
        """A block's backward begins: its own group is needed now, the one before it next, all others no more."""
        wanted = [g for g in (group, before) if g is not None]
        entries = {id(entry) for g in wanted for entry in g.entries()}
        for old in self._back:
            for entry in old.entries():
                if id(entry) not in entries:
                    entry.drop()
        for g in wanted:
            for entry in reversed(g.entries()):
                self.fetched += entry.source is None and entry.loaded is None
                entry.come_back()
        self._back = wanted

    def discard(self) -> None:
        """Forget a forward or a backward that broke off: wait for what is under way, however it ends, and let it go."""
        self._group = None
        leaving, self._leaving, self._back = self._leaving, [], []
        for group in leaving:
            for entry in group:
                entry.abandon()


def _ended(pending: Pending | None) -> None:
    """Wait for a copy whose bytes are needed no more: a place that failed has said so, or will at the next copy."""
    if pending is not None:
        with suppress(OSError, OffloadError):
            pending.wait()


class Stamps:
    """A number for each storage, given when it is first seen: an address is used again as soon as it is freed."""

    def __init__(self) -> None:
        self._next = count()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def of(self, storage: torch.UntypedStorage) -> int:
        """The stamp of a storage."""
        key = storage._cdata
        found = self._known.get(key)
        if found is None or found[0]() is None:
            found = (weakref.ref(storage, lambda _: self._known.pop(key, None)), next(self._next))
            self._known[key] = found
        return found[1]


def staying(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that a block keeps and does not own: parameters and buffers; and what follows the hidden states, which
    all blocks share."""
    yield from module.parameters()
    yield from module.buffers()
    yield from _tensors((args[1:], list(kwargs.values()) if args else list(kwargs.values())[1:]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _span(tensor: Tensor) -> int:
    """Bytes from the first to the last number of a tensor; 0 of one that is not dense."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def version_only(tensor: Tensor) -> Any:
    """A tensor without memory that shares the version counter of `tensor`; None for a simulated one."""
    if isinstance(tensor, FakeTensor):
        return None
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        watch = tensor.detach()
        _BYTES.__set__(watch, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    return watch
