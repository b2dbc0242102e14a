"""Seconds of a step from its operators: a roofline over the simulated dispatcher calls.

Each operator takes the longer of its arithmetic and its memory traffic. Matrix products and attention count
operations; everything else counts the bytes of its inputs and outputs. The two rates are a device's, from its card,
or this machine's, measured by a short probe.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skimp.core.repeat import times


@dataclass(frozen=True)
class Rates:
    """flops: operations per second in matrix products; bandwidth: bytes per second; source: where they are from.

    near: on a CPU a folder on the disk that offloaded tensors would go to; empty for a card (`plan.transfers`).
    """

    flops: float
    bandwidth: float
    source: str
    near: str = ""


class CostMeter:
    """Adds up the seconds of every operator it is shown: what a `Tracker` calls as its observer.

    Attributes:
        on: whether to count; a simulation of several steps counts the last.
    """

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.seconds = 0.0
        self.flops = 0
        self.on = True

    def __call__(self, func: Any, args: Any, out: Any) -> None:
        if not self.on or func.is_view:
            return
        flops = _flops(func._schema.name, args)
        traffic = _bytes(args) + (_bytes(out) if isinstance(out, (tuple, list)) else _bytes((out,)))
        often = times()
        self.flops += often * flops
        self.seconds += often * max(flops / self.rates.flops, traffic / self.rates.bandwidth)


def _bytes(values: Any) -> int:
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)):
            total += _bytes(value)
    return total


def _flops(name: str, args: Any) -> int:
    """Multiplications and additions; causal attention counts half of its square."""
    if name in ("aten::mm", "aten::bmm"):
        return 2 * args[0].numel() * args[1].shape[-1]
    if name in ("aten::addmm", "aten::addmm_", "aten::baddbmm"):
        return 2 * args[1].numel() * args[2].shape[-1]
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        return 2 * args[0].numel() * args[1].shape[2]
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        return 5 * args[1].numel() * args[2].shape[2]
    return 0


def probe() -> Rates:
    """This machine's rates, measured once for each number of threads; a plan made amid a run must not take 46 MB again.

    A third of a second: float32 products of training's shape, and a large copy. The median of several tries, because
    machines are shared.
    """
    return _measured(torch.get_num_threads())


@cache
def _measured(threads: int) -> Rates:
    a, b = torch.ones(512, 1024), torch.ones(1024, 2048)
    flops = 2 * 512 * 1024 * 2048 / _median_seconds(lambda: torch.mm(a, b), 7)
    source = torch.ones(1 << 22)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _median_seconds(lambda: torch.mul(source, 2.0, out=target), 7)
    return Rates(flops, bandwidth, f"measured here on {threads} threads")


def _median_seconds(call: Any, tries: int) -> float:
    call()
    spent = []
    for _ in range(tries):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return sorted(spent)[tries // 2]
