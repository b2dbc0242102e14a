"""The shape of one chunked head: how many rows at a time, which buffers, how many bytes.

One list of buffers serves twice: the loop allocates it and the planner adds it up, so the formula cannot
drift from the code.

The rule for rows. A chunk of logits holds rows x V numbers. The hidden states (N x H) are there anyway, so a
chunk of about their size, rows = N H / V, is never the largest thing. Below that, each chunk reads and writes
the V x H weight gradient once (8 V H bytes in float32) for 2 rows V H operations: rows / 4 operations per
byte, so few rows wait for memory. Measured on two cores, N = 2048, H = 576, V = 49152, forward and backward:
plain path 1.67 s; 64 rows 1.87 s, 128 rows 1.46 s, 256 rows 1.39 s, 512 rows 1.33 s. Hence at least 256.
Worked: that case asks for 24 and gets 256 rows = 50.3 MB of float32 logits, where the whole matrix is 403 MB.
N = 8192, H = 4096, V = 128256 asks for 262 and gets 320 rows = 164 MB, where the whole matrix is 4.20 GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

MIN_ROWS = 256
MAX_ROWS = 2048
#: A slice of the vocabulary that is cast on the way is kept near 4 Mi numbers (16 MiB in float32), small
#: beside the weight, but never less than a 16th of the vocabulary: a simulated step pays per operator. H =
#: 576, V = 49152 gives 7281 rows; H = 4096, V = 128256 gives 8016 (66 MB in bfloat16).
TILE_NUMBERS, TILES = 2**22, 16

Buffer = tuple[tuple[int, ...], torch.dtype]


def default_rows(tokens: int, hidden: int, vocab: int) -> int:
    """Rows per chunk: N H / V rounded up to a multiple of 64, within 256 .. 2048, at most all tokens."""
    wanted = -(-tokens * hidden // vocab)
    wanted = -(-wanted // 64) * 64
    return max(1, min(tokens, max(MIN_ROWS, min(MAX_ROWS, wanted))))


def nbytes(buffer: Buffer) -> int:
    """Bytes of one buffer."""
    shape, dtype = buffer
    return prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class HeadSpec:
    """Sizes, dtypes and options of one call of the head.

    Attributes:
        tokens, hidden, vocab: N, H, V.
        rows: tokens per chunk.
        hidden_dtype, weight_dtype: storage of the two inputs.
        exact: dtype of logits, softmax, losses and sums: float64 when an input is, else float32.
        compute: dtype of the operands of the three matrix products.
        weight_grad_dtype: dtype of the V x H accumulator; None when the weight is frozen.
        grad_hidden: hidden states need a gradient.
        bias, grad_bias: there is a bias; it needs a gradient.
        smoothing, z_loss, softcap, logit_scale: the options of `linear_cross_entropy`.
    """

    tokens: int
    hidden: int
    vocab: int
    rows: int
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    exact: torch.dtype
    compute: torch.dtype
    weight_grad_dtype: torch.dtype | None = None
    grad_hidden: bool = False
    bias: bool = False
    grad_bias: bool = False
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float | None = None

    @property
    def low(self) -> bool:
        """The products run below the dtype of the logits (bfloat16 on an accelerator)."""
        return self.compute != self.exact

    @property
    def grad(self) -> bool:
        return self.grad_hidden or self.grad_bias or self.weight_grad_dtype is not None

    @property
    def tile(self) -> int:
        """Vocabulary rows of the weight per product: all of them unless the weight is cast."""
        return self.vocab if self.weight_dtype == self.compute else self._slice()

    @property
    def grad_tile(self) -> int:
        """Vocabulary rows of the weight gradient per product: a slice when the sum takes a detour."""
        return min(self.tile, self._slice()) if self.grad_detour else self.tile

    @property
    def grad_detour(self) -> bool:
        """The product cannot sum into the weight gradient itself: their dtypes differ."""
        return self.weight_grad_dtype not in (None, self.compute)

    def _slice(self) -> int:
        return min(self.vocab, max(TILE_NUMBERS // self.hidden, -(-self.vocab // TILES)))

    def tiles(self) -> list[tuple[int, int]]:
        return [(t, min(t + self.tile, self.vocab)) for t in range(0, self.vocab, self.tile)]

    def buffers(self) -> dict[str, Buffer]:
        """Everything the loop allocates once and uses for every chunk."""
        r, h, v, t, x, c = self.rows, self.hidden, self.vocab, self.tile, self.exact, self.compute
        # With float32 everywhere this is one rows x V matrix and three columns.
        out: dict[str, Buffer] = {"logits": ((r, v), x)}
        out |= dict.fromkeys(("lse", "top", "target"), ((r, 1), x))
        if self.smoothing:
            out["total"] = ((r, 1), x)
        if self.softcap is not None and self.grad:
            out["capped"] = (
                (r, v),
                x,
            )  # tanh(x / cap): its derivative is needed after the softmax overwrote x
        if self.grad_bias:
            out["ones"] = ((r,), x)
        if self.hidden_dtype != c:
            out["hidden_cast"] = ((r, h), c)
        if self.weight_dtype != c:
            out["weight_cast"] = ((t, h), c)
        if self.low:
            out["tile_low"] = ((r * t,), c)
        if self.grad_hidden and (self.hidden_dtype != c or (self.hidden_dtype != x and t < v)):
            out["dh"] = ((r, h), x)  # summed here, then rounded once to the dtype of hidden
        if self.grad_hidden and self.low and "dh" in out:
            out["dh_low"] = ((r, h), c)
        if self.grad_detour:
            out["dw"] = ((self.grad_tile, h), c)
        return out

    def buffer_bytes(self) -> int:
        return sum(nbytes(b) for b in self.buffers().values())


def exact_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float64 when any input is float64, else float32: softmax and sums are never done in half precision."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def chunk_bytes(
    n_tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    chunk_rows: int | None = None,
    *,
    weight_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    train_hidden: bool = True,
    train_weight: bool = True,
    sink: bool = False,
    softcap: bool = False,
    logit_scale: bool = False,
    label_smoothing: bool = False,
    accumulate: str = "float32",
) -> int:
    """Bytes that one training call of `linear_cross_entropy` (mean or sum, no bias) adds at its peak.

    N (8 + 2 e) for safe labels, scales and losses (e = 4, or 8 in float64); N H for the hidden gradient; V H
    for the weight gradient unless it goes into a sink; and the buffers of `HeadSpec`. A half-precision weight
    accumulated in float32 ends with the V H cast beside the V H accumulator, which counts when it is the
    larger moment. The products are taken to run in float32 (float64) unless `compute_dtype` says otherwise.
    """
    weight_dtype = weight_dtype or dtype
    exact = exact_dtype(dtype, weight_dtype)
    grad_dtype = (exact if accumulate == "float32" else weight_dtype) if train_weight else None
    spec = HeadSpec(
        n_tokens,
        hidden,
        vocab,
        min(n_tokens, chunk_rows or default_rows(n_tokens, hidden, vocab)),
        dtype,
        weight_dtype,
        exact,
        compute_dtype or exact,
        weight_grad_dtype=grad_dtype,
        grad_hidden=train_hidden,
        smoothing=float(label_smoothing),
        softcap=1.0 if softcap else None,
    )
    held = n_tokens * (8 + (3 if logit_scale else 2) * exact.itemsize)
    if train_hidden:
        held += n_tokens * hidden * dtype.itemsize
    scalars = 2 * exact.itemsize if softcap else exact.itemsize if logit_scale else 0
    own = grad_dtype is not None and not sink
    accumulator = vocab * hidden * grad_dtype.itemsize if own and grad_dtype is not None else 0
    cast = vocab * hidden * weight_dtype.itemsize if own and grad_dtype != weight_dtype else 0
    return held + accumulator + max(spec.buffer_bytes() + scalars, cast)
