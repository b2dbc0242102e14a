"""Apply a token-wise function a few tokens at a time, so that its wide insides never exist whole.

An MLP of width I keeps about 3 I numbers per token for its backward; here only its input is kept, and each
chunk is run again in backward, at one more forward of the function. Parameter gradients are summed over
chunks in float32 and returned to autograd once, so hooks, accumulation and sharding see an ordinary gradient.

Where a fused norm made the input, the norm's own input is kept instead, which the norm keeps anyway, and the chunk is
made again from it (`core.remake`). What is kept is kept *before* the function runs: a recomputed block, whose second
run ends with the last tensor that it must give back, therefore does not run a function at its end a second time whole
and a third time in chunks; under recompute the chunks cost nothing.

Source: Mini-Sequence Transformer, arXiv 2407.15892, section 3 (there the gradient was written by hand and
counted twice; here autograd alone delivers it). Exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.errors import SkimpError
from skimp.core.position import Position, declared_tokens, position
from skimp.core.remake import Remake, how_made
from skimp.core.repeat import rounds


def chunked(
    fn: Callable[[Tensor], Tensor], x: Tensor, params: Sequence[Tensor] | None = None, chunk: int = 1024
) -> Tensor:
    """`fn(x)` for a token-wise `fn`, `chunk` tokens at a time.

    Args:
        fn: maps (n, H) to (n, ...) for any n, each row by itself; deterministic (it is run again in backward:
            no dropout from the global generator; masks addressed by `core.position` are the whole's own). Autocast is
            as it was when it runs again.
        x: (..., H); the first dimension of three or more is that of rows.
        params: every tensor requiring grad that `fn` uses; None: `fn.parameters()` of an nn.Module.
        chunk: tokens per chunk; the last may be smaller.

    Returns:
        (..., *) as `fn(x)`; with one chunk bit-equal to it, gradients included. Extra bytes in backward: one
        chunk's insides, and per trained parameter 4 bytes an element for the sum plus one chunk's gradient.

    Raises:
        SkimpError: chunk < 1, no params for a plain function, an output that is not row by row, or (in
            backward) a trained parameter that was not named in `params` and would have lost its gradient.
    """
    if chunk < 1:
        raise SkimpError("a chunk of 1 token or more", f"{chunk}")
    if params is None:
        if not isinstance(fn, nn.Module):
            raise SkimpError(
                "chunked(fn, x) without params",
                f"fn is a {type(fn).__name__}, not an nn.Module",
                "the gradients of what it uses are returned through autograd and must be named",
                "give params=[...], or an empty list when it uses none",
            )
        params = list(fn.parameters())
    trained = [p for p in params if p.requires_grad]
    loop = _Loop(fn, chunk, tuple(x.shape))
    if not (torch.is_grad_enabled() and (x.requires_grad or trained)):
        y = loop.whole(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], *y.shape[1:])
    loop.recorded, made = True, how_made(x)
    flat = x.reshape(-1, x.shape[-1])
    if flat.requires_grad:
        flat = _Keep.apply(flat, made)
        y = _Chunked.apply(loop, None if made is None else made.again.make, flat.grad_fn, flat, *trained)
    else:
        y = _Chunked.apply(loop, None, None, flat, *trained)
    return y.view(*x.shape[:-1], *y.shape[1:])


class _Loop:
    """The function over chunks of (tokens, H), each at its place."""

    def __init__(self, fn: Callable[[Tensor], Tensor], chunk: int, shape: tuple[int, ...]) -> None:
        self.fn, self.chunk, self.shape = fn, chunk, shape
        self.tokens = 1
        for size in shape[:-1]:
            self.tokens *= size
        self.place: Position | None = position()
        self.recorded = False

    def starts(self) -> range:
        """First token of every chunk; one chunk of none where there is no token."""
        return range(0, max(1, self.tokens), self.chunk)

    def run(self, x: Tensor, start: int) -> Tensor:
        """One chunk, knowing which tokens it has: masks are addressed by that."""
        with declared_tokens(self.place, self.tokens // max(1, self.shape[0]), start, self.recorded):
            return self.fn(x)

    def whole(self, x: Tensor) -> Tensor:
        """All chunks into one preallocated output: a cat at the end would hold it twice."""
        out: Tensor | None = None
        with torch.no_grad():
            for start in rounds(self.starts()):
                part = self.run(x[start : start + self.chunk], start)
                rows = min(self.chunk, x.shape[0] - start)
                if part.dim() < 1 or part.shape[0] != rows:
                    raise SkimpError(
                        "a token-wise function for chunked()",
                        f"{rows} rows in, output of shape {tuple(part.shape)}",
                        "each token must give one row, computed from that token alone",
                        "chunk only the MLP or the head, not a block with attention",
                    )
                if out is None:
                    out = part.new_empty((x.shape[0], *part.shape[1:]))
                out[start : start + rows].copy_(part)
        assert out is not None  # the loop runs at least once
        return out


class _Keep(torch.autograd.Function):
    """Keeps the input, or what makes it again, before the function runs; its gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: Remake | None) -> Tensor:
        ctx.save_for_backward(*((x,) if made is None else made.inputs))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loop: _Loop, make: Callable[..., Tensor] | None, kept: Any, x: Tensor, *params: Tensor
    ) -> Tensor:
        ctx.loop, ctx.make, ctx.autocast = loop, make, _autocast_now(x.device.type)
        # Parameters stay outside the saved tensors: a recomputed region gives those back as other objects,
        # and `fn` uses these very ones. Their versions are checked by hand instead.
        ctx.params, ctx.versions = params, [p._version for p in params]
        ctx.kept, ctx.dtype = kept, x.dtype
        if kept is None:
            ctx.save_for_backward(x)
        return loop.whole(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        loop: _Loop = ctx.loop
        kept = ctx.saved_tensors if ctx.kept is None else ctx.kept.saved_tensors
        params = list(ctx.params)
        _refuse_stale(params, ctx.versions)
        dx = upstream.new_empty((loop.tokens, loop.shape[-1]), dtype=ctx.dtype) if ctx.needs_input_grad[3] else None
        sums: list[Tensor | None] = [None] * len(params)
        for start in rounds(loop.starts()):
            stop = start + loop.chunk
            part = _rows(kept, ctx.make, loop, start, stop).requires_grad_(dx is not None)
            with torch.enable_grad(), ctx.autocast():
                y = loop.run(part, start)
            if start == 0:
                _refuse_unnamed(y, [part, *params])
            wanted = [*([part] if dx is not None else []), *params]
            got = list(torch.autograd.grad(y, wanted, upstream[start:stop], allow_unused=True))
            del y
            if dx is not None:
                grad = got.pop(0)
                dx[start:stop].zero_() if grad is None else dx[start:stop].copy_(grad)
            for i, grad in enumerate(got):
                sums[i] = _add(sums[i], grad)
            del got, grad
        # Back to the parameter's dtype, which autograd requires: the one rounding of the whole sum.
        given = [None if s is None else s.to(p.dtype) for s, p in zip(sums, params, strict=True)]
        return (None, None, None, dx, *given)


def _rows(kept: Sequence[Tensor], make: Callable[..., Tensor] | None, loop: _Loop, start: int, stop: int) -> Tensor:
    """One chunk of the input, cut from what was kept or made again from that: what has the input's shape is cut, the
    rest (a norm's gain) is the same for all tokens."""
    parts = [
        t.reshape(-1, t.shape[-1])[start:stop].detach() if make is None or t.shape == loop.shape else t.detach()
        for t in kept
    ]
    if make is None:
        return parts[0]
    with torch.no_grad():
        return make(*parts)


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return total
    if total is None:
        half = grad.dtype in (torch.bfloat16, torch.float16)
        # A gradient that autograd may share (an expanded view, say) must not be summed into.
        return grad.to(torch.float32) if half else grad.clone() if _shared(grad) else grad
    return total.add_(grad.to(total.dtype))


def _shared(grad: Tensor) -> bool:
    return grad._is_view() or not grad.is_contiguous()


def _refuse_stale(params: Sequence[Tensor], versions: Sequence[int]) -> None:
    """What autograd checks for saved tensors: nothing may have changed since the forward."""
    if torch.is_grad_enabled():
        raise SkimpError(
            "create_graph=True through chunked()",
            "a gradient of its gradient was asked for",
            "the chunks are run again in backward and their graphs dropped",
            "call fn(x) itself where second derivatives are needed",
        )
    for p, version in zip(params, versions, strict=True):
        if p._version != version:
            raise SkimpError(
                "backward through chunked()",
                f"a parameter of shape {tuple(p.shape)} was changed in place after the forward",
                "the chunks are run again and would give the gradient at another point",
                "update parameters only when their last gradient of the step is there",
            )


def _refuse_unnamed(y: Tensor, named: Sequence[Tensor]) -> None:
    """Walk the small graph of one chunk: a leaf that is not in `named` would silently get no gradient."""
    known = {id(t) for t in named}
    stack, seen = [y.grad_fn], {t.grad_fn for t in named if t.grad_fn is not None}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise SkimpError(
                "chunked(fn, x, params)",
                f"fn uses a trained tensor of shape {tuple(leaf.shape)} that is not in params",
                "its gradient would be lost",
                "add it to params",
            )
        stack += [n for n, _ in node.next_functions]


def _autocast_now(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of the autocast context that is active now, to be entered again in backward."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    cache = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
