"""Each rule of what ATen allocates inside one call, against the c10 allocator's events, on one and on two
threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker
from skimp.core.workspace import declared

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64


def flash(seq: int, dim: int, dtype: torch.dtype, keys: int | None = None) -> Callable[[], Any]:
    q = torch.randn(2, 3, seq, dim, dtype=dtype)
    k, v = (torch.randn(2, 3, keys or seq, dim, dtype=dtype) for _ in range(2))
    return lambda: FLASH(q, k, v, 0.0, keys is None)


def flash_backward(seq: int, dim: int, dtype: torch.dtype, strided: bool = False) -> Callable[[], Any]:
    q, k, v = (torch.randn(2, 3, seq, dim, dtype=dtype) for _ in range(3))
    # As the model gives it, laid out (rows, seq, heads, dim); or otherwise, and then copied.
    g = (
        torch.randn(2, 3, seq, dim, dtype=dtype)
        if strided
        else torch.randn(2, seq, 3, dim, dtype=dtype).transpose(1, 2)
    )
    out, lse = FLASH(q, k, v, 0.0, True)
    return lambda: FLASH_BACKWARD(g, q, k, v, out, lse, 0.0, True)


def norm_backward(shape: tuple[int, ...], dtype: torch.dtype, strided: bool, wanted: bool = True) -> Callable[[], Any]:
    x, width = torch.randn(shape, dtype=dtype), shape[-1]
    weight, bias = torch.ones(width, dtype=dtype), torch.zeros(width, dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, [width], weight, bias, 1e-5)
    g = torch.randn(*shape[:-1], 2 * width, dtype=dtype)[..., ::2] if strided else torch.randn(shape, dtype=dtype)
    masks = [True, wanted, wanted]
    return lambda: torch.ops.aten.native_layer_norm_backward(g, x, [width], mean, rstd, weight, bias, masks)


def embedding_backward(strided: bool) -> Callable[[], Any]:
    ids = torch.randint(0, 11, (3, 7))
    g = torch.randn(3, 7, 10)[..., ::2] if strided else torch.randn(3, 7, 5)
    return lambda: torch.ops.aten.embedding_dense_backward(g, ids, 11, -1, False)


def numbers(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape, dtype=dtype) if dtype == I64 else torch.randn(shape, dtype=torch.float64).to(dtype)


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(operator and case, call); inputs are made outside the call."""
    for dtype in (F32, F64, BF16, I64):
        x = numbers(37, 19, dtype=dtype)
        y = numbers(37, 19, dtype=dtype)
        for name in ("add", "sub", "mul", "div", "remainder", "eq", "lt"):
            if name == "div" and dtype == I64:
                continue  # its result is float32, and both sides are cast; nothing in a training step does it
            function = getattr(torch, name)
            yield f"{name} {dtype} number", lambda f=function, x=x: f(x, 2)
            if dtype != I64:
                yield f"{name} {dtype} float", lambda f=function, x=x: f(x, 2.5)
            yield f"{name} {dtype} tensor", lambda f=function, x=x, y=y: f(x, y)
        yield f"mul_ {dtype}", lambda x=x: x.clone().mul_(3)
        yield f"rsub {dtype}", lambda x=x: torch.rsub(x, 3)
        yield f"maximum {dtype}", lambda x=x, y=y: torch.maximum(x, y)
    kept = torch.tensor(0.5, dtype=F64)
    for dtype in (F32, F64, BF16):
        x = numbers(37, 19, dtype=dtype)
        yield f"mul {dtype} kept number", lambda x=x: x * kept
        yield f"mean {dtype}", lambda x=x: x.mean(-1, keepdim=True)
        yield f"sum {dtype} small", lambda x=x: x.sum()
        yield f"sum {dtype} rows", lambda x=x: x.sum(0)
        turned, spread = x.t(), numbers(37, 38, dtype=dtype)[:, ::2]
        yield f"mm {dtype}", lambda x=x, y=turned: torch.mm(x, y)
        yield f"mm {dtype} strided", lambda x=spread, y=turned: torch.mm(x, y)
        yield f"norm {dtype}", lambda x=x: torch.linalg.vector_norm(x)
        big = numbers(300, 200, dtype=dtype)
        yield f"sum {dtype} full", lambda x=big: x.sum()
        yield f"sum {dtype} big rows", lambda x=big: x.sum(1)
    half = numbers(37, 19, dtype=BF16)
    yield "norm bf16 wider", lambda: torch.linalg.vector_norm(half, dtype=F32)
    for rows, inner, columns in (
        (64, 32, 64),
        (37, 19, 37),
        (24, 48, 104),
        (100, 7, 100),
        (5, 7, 300),
        (16, 16, 16),
        (1, 16, 48),
    ):
        for dtype in (BF16, F32):
            a, b = numbers(rows, inner, dtype=dtype), numbers(inner, columns, dtype=dtype)
            bias = numbers(columns, dtype=dtype)
            yield f"mm {dtype} {rows, inner, columns}", lambda a=a, b=b: torch.mm(a, b)
            yield f"addmm {dtype} {rows, inner, columns}", lambda a=a, b=b, c=bias: torch.addmm(c, a, b)
            into = numbers(rows, columns, dtype=dtype)
            across = b.t().contiguous().t()
            for alpha in (1, 2.0):
                for words, right in (("", b), (" across", across)):
                    yield (
                        f"addmm_ {dtype} {rows, inner, columns} {alpha}{words}",
                        lambda a=a, b=right, c=into, alpha=alpha: c.clone().addmm_(a, b, alpha=alpha),
                    )
            for batch in (1, 3):
                a, b = numbers(batch, rows, inner, dtype=dtype), numbers(batch, inner, columns, dtype=dtype)
                yield f"bmm {dtype} {batch, rows, inner, columns}", lambda a=a, b=b: torch.bmm(a, b)
    for seq in (1, 7, 31, 32, 100, 192, 300, 768, 1000):
        yield f"flash {seq}", flash(seq, 8, F32)
    for dtype in (F64, BF16):
        for seq in (7, 100, 300, 800):
            yield f"flash {seq} {dtype}", flash(seq, 16, dtype)
    yield "flash one query", flash(1, 8, F32, keys=300)
    for seq in (1, 7, 100, 192, 300, 768):
        yield f"flash backward {seq}", flash_backward(seq, 8, F32)
        yield f"flash backward {seq} strided", flash_backward(seq, 8, F32, strided=True)
    for dtype in (F64, BF16):
        for seq in (7, 100, 300):
            yield f"flash backward {seq} {dtype}", flash_backward(seq, 16, dtype)
    for dtype in (F32, F64):
        yield f"layer norm backward {dtype}", norm_backward((5, 7, 24), dtype, False)
        yield f"layer norm backward {dtype} strided", norm_backward((5, 7, 24), dtype, True)
        yield f"layer norm backward {dtype} frozen", norm_backward((5, 7, 24), dtype, False, wanted=False)
    for dtype in (F32, F64):
        for n in (1, 2, 7, 48, 144):
            square = numbers(n, n + 5, dtype=dtype)
            square = square @ square.t()
            factor, right = torch.linalg.cholesky(square), numbers(n, 3, dtype=dtype)
            yield f"eigh {dtype} {n}", lambda a=square: torch.linalg.eigh(a)
            yield f"cholesky {dtype} {n}", lambda a=square: torch.linalg.cholesky(a)
            yield f"cholesky solve {dtype} {n}", lambda a=factor, b=right: torch.cholesky_solve(b, a)
        tall, wide = numbers(40, 90, dtype=dtype), numbers(90, 40, dtype=dtype)
        few, some = numbers(90, dtype=dtype), torch.randint(0, 40, (7,), dtype=torch.int32)
        thin, flat, turned = numbers(40, 5, dtype=dtype), numbers(5, 90, dtype=dtype), wide.t()
        seven = numbers(7, 90, dtype=dtype)
        yield f"addmm_ {dtype} turned", lambda a=thin, b=flat, c=wide: c.clone().t().addmm_(a, b, beta=0.9)
        yield f"sort {dtype}", lambda a=few: a.argsort(stable=True)
        yield f"topk {dtype}", lambda a=few: torch.topk(a, 7)
        yield f"cumsum {dtype}", lambda a=few: a.abs().cumsum(0)
        yield f"rows {dtype}", lambda a=tall, i=some: a.index_select(0, i)
        yield f"rows {dtype} turned", lambda a=turned, i=some: a.index_select(0, i)
        yield f"add rows {dtype}", lambda a=seven, c=wide, i=some: c.clone().t().index_add_(0, i, a)
        yield f"mv {dtype}", lambda a=tall, b=few: torch.mv(a, b)
        yield f"column norms {dtype}", lambda a=tall: torch.linalg.vector_norm(a, dim=0, keepdim=True)
        yield f"largest {dtype}", lambda a=tall: a.abs().argmax(0, keepdim=True)
        yield f"min {dtype}", lambda a=tall: a.amin(1)
    yield "embedding backward", embedding_backward(False)
    yield "embedding backward strided", embedding_backward(True)


CASES = dict(calls())


def bfloat16_instructions() -> bool:
    """Such CPUs multiply bfloat16 without the float32 detour that the rules state; they allocate less."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@pytest.mark.parametrize("count", [1, 2])
def test_outputs_and_stated_workspace_are_what_is_allocated(count: int) -> None:
    wrong = {}
    old = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        for name, call in CASES.items():
            if "bfloat16" in name and bfloat16_instructions():
                continue
            call()  # first calls fill library caches
            with torch.no_grad():
                _, seen = witness(call)
                with Tracker() as tracker:
                    call()
            if tracker.peak.total != seen.peak:
                wrong[name] = f"stated {tracker.peak.total}, allocated {seen.peak}"
    finally:
        torch.set_num_threads(old)
    assert not wrong


def test_every_rule_has_a_case() -> None:
    ruled = {name.removeprefix("aten::") for name in declared() if name.startswith("aten::")}
    seen: set[str] = set()
    for call in CASES.values():
        with torch.no_grad(), Tracker(operators=True) as tracker:
            call()
        seen |= {name.split(".")[1] for name in tracker.operators or []}
    # In-place and ordering forms share `_scalar` with the ones called here.
    shared = {"add_", "sub_", "div_", "minimum", "fmod", "ne", "le", "gt", "ge"}
    assert ruled - shared <= seen
