"""Attention on a CUDA or HIP device, real or simulated: which kernel, and one autograd function for all of them.

- *flash*: variable-length, for halves from capability 8.0 on, heads of up to 256 that are a multiple of 8. Grouped
  queries as they are, windows inside the kernel. Keeps q, k, v, the output and a float per token and head.
- *efficient*: variable-length too, for float32, older cards and heads that flash does not take; keys and values are
  repeated for grouped queries, for the length of the call. Its log-sum-exp has a row of the longest document's length,
  rounded up to 32, for every document.
- *blocks*: `core.windowed`, plain products over blocks of 128 queries, for what is left: a cap on the scores, heads of
  an odd size, float64, queries over a longer past.

What flash's backward allocates inside is stated in `core.memory.aten_cuda`. Rules of PyTorch's kernels: its notes on
scaled_dot_product_attention, and FlashAttention-2 (Dao, 2023, arXiv 2307.08691) for what backward needs.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from skimp.core.workspace import declare_workspace

Kernel = Literal["flash", "efficient", "blocks"]
Documents = tuple[tuple[int, ...], ...]
HALVES = (torch.bfloat16, torch.float16)
#: FlashAttention-2's widest head; between NARROW and WIDE its backward needs the shared memory of data centre cards.
WIDEST, NARROW, WIDE = 256, 192, 224
#: Causal in the efficient kernel's own numbering: from the top left, which is the bottom right for equal lengths.
CAUSAL = 1


def kernel_for(capability: str, dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> Kernel:
    """The kernel that takes attention of these facts.

    Args:
        capability: "8.9" for CUDA, a gfx name for HIP; "" for a card of which nothing is known, taken as 8.0.
        dtype: of queries, keys and values.
        head_dim: numbers in a head.
        softcap: a cap on the scores; no kernel of torch's has one.
    """
    if softcap is not None:
        return "blocks"
    hip = capability.startswith("gfx")
    major, _, minor = (capability or "8.0").partition(".")
    number = (8, 0) if hip else (int(major), int(minor or 0))
    if dtype in HALVES and number >= (8, 0) and head_dim % 8 == 0 and head_dim <= WIDEST:
        roomy = hip or number in ((8, 0), (9, 0), (10, 0))
        if roomy or not NARROW < head_dim <= WIDE:
            return "flash"
    aligned = head_dim % (4 if dtype == torch.float32 else 8) == 0
    known = dtype == torch.float32 or dtype == torch.float16 or (dtype == torch.bfloat16 and number >= (8, 0))
    return "efficient" if known and aligned and not hip and number >= (5, 0) else "blocks"


@cache
def capability_of(index: int) -> str:
    """The capability of a device of this machine."""
    properties = torch.cuda.get_device_properties(index)
    return str(getattr(properties, "gcnArchName", "")).partition(":")[0] or f"{properties.major}.{properties.minor}"


def cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    kernel: Kernel,
) -> Tensor:
    """Attention inside each document by `kernel`, which is not "blocks".

    Args:
        query: (rows, heads, seq, dim); `key`, `value`: (rows, kv_heads, seq, dim).
        documents: offsets in each row; None makes each row one.
        window: a query sees itself and the `window - 1` positions before it.

    Returns:
        (rows, heads, seq, dim), memory laid out as (rows, seq, heads, dim).
    """
    rows, _, seq, _ = query.shape
    lengths = [b - a for row in documents or ((0, seq),) * rows for a, b in pairwise(row)]
    offsets = _offsets(lengths, query)
    function = _Flash if kernel == "flash" else _Efficient
    packed = (_packed(t) for t in (query, key, value))
    out: Tensor = function.apply(*packed, offsets, max(lengths), scale, causal, window)
    return out.view(rows, seq, *out.shape[-2:]).transpose(1, 2)


def _offsets(lengths: list[int], query: Tensor) -> Tensor:
    """(documents + 1,) int32: where each document begins, and the end.

    Simulated, it has a shape alone: of a known value torch keeps the real tensor too, and loads its compiler for it.
    """
    if isinstance(query, FakeTensor):
        return torch.empty(len(lengths) + 1, dtype=torch.int32, device=query.device)
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=query.device)


def _packed(t: Tensor) -> Tensor:
    """(rows, heads, seq, dim) as (rows x seq, heads, dim): a view of what projections and rotary embeddings give."""
    return t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3])


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        longest: int,
        scale: float | None,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        ctx.rule = {"scale": scale, "window_size_left": -1 if window is None else window - 1}
        ctx.rule["window_size_right"] = 0 if causal else -1
        ctx.longest, ctx.causal = longest, causal
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, causal, False, **ctx.rule
        )
        ctx.save_for_backward(q, k, v, out, lse, offsets, state, unused)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, offsets, state, unused = ctx.saved_tensors
        longest = ctx.longest
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, offsets, offsets, longest, longest, 0.0, ctx.causal, state, unused, **ctx.rule
        )
        return (*grads, None, None, None, None, None)


class _Efficient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        longest: int,
        scale: float | None,
        causal: bool,
        window: int | None,
    ) -> Tensor:
        ctx.longest, ctx.scale, ctx.mask, ctx.window = longest, scale, CAUSAL if causal else 0, window
        many, wide = _repeated(k, q), _repeated(v, q)
        out, lse, seed, offset, _, _ = torch.ops.aten._efficient_attention_forward(
            *(t.unsqueeze(0) for t in (q, many, wide)),
            None,
            offsets,
            offsets,
            longest,
            longest,
            0.0,
            ctx.mask,
            True,
            scale=scale,
            window_size=window,
        )
        ctx.save_for_backward(q, k, v, out, lse, offsets, seed, offset)
        return out.squeeze(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, offsets, seed, offset = ctx.saved_tensors
        many, wide = _repeated(k, q), _repeated(v, q)
        dq, dk, dv = efficient_backward(
            *(t.unsqueeze(0) for t in (grad, q, many, wide)),
            out,
            lse,
            offsets,
            seed,
            offset,
            ctx.longest,
            ctx.mask,
            ctx.scale,
            ctx.window,
        )
        return dq.squeeze(0), _summed(dk, k), _summed(dv, v), None, None, None, None, None


@torch.library.custom_op("skimp::efficient_attention_backward", mutates_args=())
def efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    seed: Tensor,
    offset: Tensor,
    longest: int,
    mask: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, (1, tokens, heads, dim) each; an operator of its own because the simulated
    form of torch's (up to 2.13) lacks two of its arguments."""
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        grad,
        q,
        k,
        v,
        None,
        out,
        offsets,
        offsets,
        longest,
        longest,
        lse,
        0.0,
        seed,
        offset,
        mask,
        False,
        scale=scale,
        window_size=window,
    )
    return dq, dk, dv


@efficient_backward.register_fake
def _efficient_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@declare_workspace("skimp::efficient_attention_backward")
def _efficient_backward_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A sum for each row; halves collect all three gradients in float32."""
    query, key, lse = args[1], args[2], args[5]
    return int(lse.nbytes if query.itemsize == 4 else lse.nbytes + 4 * (query.numel() + 2 * key.numel()))


def _repeated(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values (tokens, kv_heads, dim), once for every head of queries."""
    groups = q.shape[1] // t.shape[1]
    return t if groups == 1 else t.repeat_interleave(groups, dim=1)


def _summed(grad: Tensor, t: Tensor) -> Tensor:
    """The gradient of a repeated tensor: over the queries' heads that share one of its."""
    grad = grad.squeeze(0)
    return grad if grad.shape[1] == t.shape[1] else grad.unflatten(1, (t.shape[1], -1)).sum(2)
