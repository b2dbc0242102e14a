"""This machine's rates by class of operator, measured in some tenths of a second and with some megabytes.

The median of several tries, because machines are shared; with the run's own dtype, width, sequence and update rule.
Measured once for each such kind of run and number of threads: a plan made amid a run must not take 40 MB again.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.core import attention
from skimp.core.errors import SkimpError
from skimp.core.memory.process import malloc_policy
from skimp.core.registry import load
from skimp.plan.cost import CostMeter, Rates
from skimp.run.build import DTYPES
from skimp.run.techniques import rule_name

#: Largest sides of what is measured: past them the rates are those of larger tensors.
TOKENS, WIDTH, INNER, LENGTH = 512, 1024, 2048, 2048
#: Numbers of a stream (8 MiB in float32) and of a parameter to update; bytes of fresh memory at a time, and bytes that
#: push a parameter out of the caches, as the others do in a step.
STREAM, PARAMETER, FRESH, OTHERS = 2 << 20, 1 << 20, 16 << 20, 24 << 20
TRIES = 7
Clock = Callable[[], float]


def probe(recipe: Any, config: Mapping[str, Any], clock: Clock = time.perf_counter) -> Rates:
    """The rates of training this recipe on this machine's CPU.

    Args:
        clock: seconds; `time.process_time` on one thread tells what a machine that others use would do alone.
    """
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 256)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 4)
    inner = int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden)
    half = recipe.precision != "fp32"
    shape = (
        min(hidden, WIDTH),
        min(inner, INNER),
        min(int(config.get("head_dim") or hidden // heads), 256),
        min(recipe.data.seq_len, LENGTH),
    )
    threads = torch.get_num_threads()
    fixed = _measured(threads, half, shape, clock)
    fault = _fault(clock) if malloc_policy() else 0.0
    return Rates(**fixed, update=_update(threads, _Rule(recipe), clock), fault=fault)


@cache
def _measured(threads: int, half: bool, shape: tuple[int, int, int, int], clock: Clock) -> dict[str, Any]:
    hidden, inner, head, seq = shape
    kind = torch.bfloat16 if half else torch.float32
    a, b = torch.ones(TOKENS, hidden, dtype=kind), torch.ones(hidden, inner, dtype=kind)
    into = torch.empty(TOKENS, inner, dtype=kind)
    product = 2 * TOKENS * hidden * inner / median_seconds(lambda: torch.mm(a, b, out=into), clock)
    heads = max(1, min(8, (1 << 22) // (seq * seq)))
    q = torch.ones(1, heads, seq, head, dtype=kind)
    with torch.no_grad():
        spent = median_seconds(lambda: attention.DocumentAttention.apply(q, q, q, None, None, True), clock, 5)
    x, y, z = torch.ones(STREAM), torch.ones(STREAM), torch.empty(STREAM)
    plain = 3 * x.nbytes / median_seconds(lambda: torch.add(x, y, out=z), clock)
    table, out = x.view(256, -1), z.view(256, -1)
    dense = 2 * x.nbytes / median_seconds(lambda: torch.softmax(table, 1, out=out), clock)
    one = torch.ones(1)
    call = median_seconds(lambda: [one.add_(1.0) for _ in range(100)], clock, 5) / 100
    return {
        "flops": product,
        "bandwidth": plain,
        "source": f"measured here on {threads} threads",
        "attention": 2 * q.numel() * seq / spent,
        "dense": dense,
        "call": call,
    }


class _Rule:
    """A recipe by its update rule and precision alone, as a key of the cache."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self._key = (repr(recipe.optimizer), recipe.precision, recipe.adapter is None)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rule) and self._key == other._key


class _Counted(TorchDispatchMode):
    """Traffic of the operators inside."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = CostMeter(Rates(1.0, 1.0, ""))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.meter(func, args, out)
        return out


@cache
def _update(threads: int, rule: _Rule, clock: Clock) -> float | None:
    """Bytes a second of the update rule's own operators; None where it will not take a lone matrix."""
    kind = DTYPES[rule.recipe.precision] if rule.recipe.adapter is None else torch.float32
    parameter = nn.Parameter(torch.zeros(1024, PARAMETER // 1024, dtype=kind))
    grad, others = torch.ones_like(parameter), torch.empty(OTHERS, dtype=torch.uint8)
    made = load(rule_name(rule.recipe), "update rule")
    if made.by_role:
        return None
    try:
        optimizer = made([parameter], lr=1e-5, **rule.recipe.optimizer.options())
        optimizer.init_state(parameter)
        with _Counted() as counted:
            optimizer.step_parameter(parameter, grad)
        spent = median_seconds(
            lambda: optimizer.step_parameter(parameter, grad), clock, 3, before=lambda: others.fill_(1)
        )
    except SkimpError:
        return None
    return (counted.meter.traffic or parameter.nbytes) / spent


@cache
def _fault(clock: Clock) -> float:
    """Seconds a byte of fresh pages costs over memory that is there, through the C library as tensors take it."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    held = libc.malloc(FRESH)

    def anew() -> None:
        place = libc.malloc(FRESH)
        ctypes.memset(place, 1, FRESH)
        libc.free(place)

    try:
        more = median_seconds(anew, clock, 5) - median_seconds(lambda: ctypes.memset(held, 1, FRESH), clock, 5)
    finally:
        libc.free(held)
    return max(0.0, more / FRESH)


def median_seconds(
    call: Callable[[], Tensor | Any], clock: Clock, tries: int = TRIES, before: Callable[[], Any] = int
) -> float:
    """The median of `tries` calls after one that warms up; `before` each of them something untimed."""
    call()
    spent = []
    for _ in range(tries):
        before()
        start = clock()
        call()
        spent.append(clock() - start)
    return sorted(spent)[tries // 2]
