"""skimp's own attention call, so that what is planned is what runs.

HF models look their attention up by name; a model built by skimp is set to "skimp", which lands in `attend`.
It takes *declared* facts (where documents begin, the window, the cap) and never looks at a tensor's values;
no S x S mask is built, real or simulated, because the name has no mask function and HF then passes None.
On a CPU each document is one causal flash call: documents cannot see each other, by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from skimp.core.cuda_attention import capability_of, cuda_attention, kernel_for
from skimp.core.errors import ModelError
from skimp.core.finer import finer
from skimp.core.prefixed import prefixed
from skimp.core.read import is_simulated
from skimp.core.repeat import rounds
from skimp.core.target import target, target_device
from skimp.core.windowed import windowed_attention

__all__ = ["DocumentAttention", "attend", "declared", "register", "target", "target_device"]
NAME = "skimp"
#: On an attention module: what attends in this call's place, called as (query, key, value, documents, scale, causal,
#: window, softcap) and giving the output laid out as the query.
OWN = "_skimp_attend"
#: On keys that a cache returns: the position of each, (key heads, keys) int64, -1 where there is none.
POSITIONS = "_skimp_positions"
Documents = tuple[tuple[int, ...], ...]
_documents: ContextVar[Documents | None] = ContextVar("skimp_documents", default=None)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@contextmanager
def declared(documents: Documents | None) -> Iterator[None]:
    """Declare where documents begin for every attention call inside; None means each row is one document.

    Args:
        documents: for each row its offsets and end, as `Batch.documents`.
    """
    token = _documents.set(documents)
    try:
        yield
    finally:
        _documents.reset(token)


def register() -> str:
    """Make "skimp" known to transformers as an attention implementation; returns the name. Idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """HF's attention interface: (rows, heads, seq, head_dim) in, (rows, seq, heads, head_dim) out.

    `key` and `value` may have fewer heads (grouped queries); they are never repeated in memory.

    Raises:
        ModelError: a mask tensor, attention dropout, sinks or a position bias, which this call cannot honour.
    """
    if attention_mask is not None or dropout or ignored.get("s_aux") is not None:
        found = (
            "a mask tensor" if attention_mask is not None else f"dropout {dropout}" if dropout else "attention sinks"
        )
        raise ModelError(
            f"attention in {type(module).__name__} with declared batch facts only",
            found,
            "skimp attends by document boundaries and never by a mask tensor",
            "pass boundaries with skimp.core.attention.declared(...) and set attention dropout to 0",
        )
    if torch.is_autocast_enabled(query.device.type):
        # Rotary angles are float32, so queries and keys come wider than values, as in torch's own.
        positions = getattr(key, POSITIONS, None)
        query, key, value = (t.to(torch.get_autocast_dtype(t.device.type)) for t in (query, key, value))
        if positions is not None:
            setattr(key, POSITIONS, positions)
    documents = _documents.get()
    if documents is not None and query.shape[2] != documents[0][-1]:
        documents = None  # generation over a cache: one token against the past
    prefix = getattr(module, "skimp_prefix", None)
    if prefix is None:
        with finer():
            return _attend(module, query, key, value, documents, scaling, sliding_window, softcap), None
    attended = partial(_attend, module, documents=None, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    with finer():
        return prefixed(prefix(), query, key, value, documents, attended), None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention inside each document, by the kernel that the device has for it; (rows, seq, heads, dim)."""
    causal = bool(getattr(module, "is_causal", True)) and query.shape[2] > 1
    own = getattr(module, OWN, None)
    if own is not None:
        return own(query, key, value, documents, scaling, causal, sliding_window, softcap).transpose(1, 2)
    window = sliding_window if sliding_window is not None and sliding_window < key.shape[2] else None
    capability = _capability(query)
    if capability is not None and key.shape[2] == query.shape[2]:
        kernel = kernel_for(capability, query.dtype, query.shape[3], softcap)
        if kernel != "blocks":
            out = cuda_attention(query, key, value, documents, scaling, causal, window, kernel)
            return out.transpose(1, 2)
    # Several queries over a longer past (a prompt read in pieces, the next turn of a chat) are its last positions;
    # causal flash attention on a CPU would align the first query with the first key.
    behind = causal and key.shape[2] != query.shape[2]
    if capability is not None and not causal and query.shape[2] > 1:
        raise ModelError(
            f"attention in {type(module).__name__} to both sides on a {query.device.type} device",
            f"{query.dtype}, heads of {query.shape[3]}",
            "no kernel of torch's takes them, and skimp's own blocks are causal",
            "precision bf16 on a card of capability 8.0 or later",
        )
    if capability is not None or behind or softcap is not None or window is not None:
        out = windowed_attention(query, key, value, documents, scaling, sliding_window, softcap)
    else:
        out = DocumentAttention.apply(query, key, value, documents, scaling, causal)
    return out.transpose(1, 2)


def _capability(query: Tensor) -> str | None:
    """The capability of the device the tensor is on or stands for; None on a CPU."""
    if query.device.type == "cuda" and not is_simulated(query):
        return capability_of(query.device.index or 0)
    device, _, capability = target_device().partition(":")
    return None if device == "cpu" else capability


class DocumentAttention(torch.autograd.Function):
    """Causal attention inside each document.

    Saves q, k, v, the output and one float per row and head (the log-sum-exp): 4 tensors of the layer's width,
    whatever the sequence length; the S x S scores exist only as one block per thread.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None,
        scale: float | None,
        causal: bool,
    ) -> Tensor:
        pieces = _pieces(documents, query.shape[0], query.shape[2])
        if pieces is None:
            out, lse = _flash(query, key, value, 0.0, causal, scale=scale)
        else:
            # Laid out (rows, seq, heads, dim) in memory, as the flash call does, so the reshape after it is free.
            rows, heads, seq, dim = query.shape
            out = query.new_empty(rows, seq, heads, dim).transpose(1, 2)
            kind = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
            lse = query.new_empty(rows, seq, heads, dtype=kind).transpose(1, 2)
            for row, start, stop in _rounds(pieces):
                cut = (slice(row, row + 1), slice(None), slice(start, stop))
                piece, piece_lse = _flash(query[cut], key[cut], value[cut], 0.0, causal, scale=scale)
                out[cut].copy_(piece)
                lse[cut].copy_(piece_lse)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pieces, ctx.scale, ctx.causal = pieces, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        if ctx.pieces is None:
            grads = _flash_backward(grad, query, key, value, out, lse, 0.0, ctx.causal, scale=ctx.scale)
            return (*grads, None, None, None)
        dq, dk, dv = (
            t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (query, key, value)
        )
        for row, start, stop in _rounds(ctx.pieces):
            cut = (slice(row, row + 1), slice(None), slice(start, stop))
            parts = _flash_backward(
                grad[cut], query[cut], key[cut], value[cut], out[cut], lse[cut], 0.0, ctx.causal, scale=ctx.scale
            )
            for place, part in zip((dq, dk, dv), parts, strict=True):
                place[cut].copy_(part)
        return dq, dk, dv, None, None, None


def _pieces(documents: Documents | None, rows: int, seq: int) -> tuple[tuple[int, int, int], ...] | None:
    """(row, start, stop) of each document, or None when every row is one document: then one call does them all."""
    if documents is None or all(d == (0, seq) for d in documents):
        return None
    if len(documents) != rows:
        raise ModelError(f"document boundaries for {rows} rows", f"boundaries for {len(documents)} rows")
    return tuple((r, a, b) for r, d in enumerate(documents) for a, b in pairwise(d))


def _rounds(pieces: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """The pieces row by row; in a search's simulation, whose rows are cut alike, of three rows that stand for all."""
    rows = [list(group) for _, group in groupby(pieces, key=itemgetter(0))]
    for row in rounds(range(len(rows))):
        yield from rows[row]
