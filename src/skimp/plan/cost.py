"""Seconds of a step from its operators: a roofline over the simulated dispatcher calls, by class of operator.

A product or an attention takes the longer of its arithmetic at the rate of its class and its memory traffic; everything
else is traffic. Two rates of traffic: plain streams (sums, products, copies), and those that compute on the way
(softmax, norms, activations) and reach about half of that on a CPU. The update rule has a rate of its own. Each call
costs a little whatever it does, and on a CPU fresh pages must be mapped and zeroed (`fault`), where the allocator gives
freed memory back to the system.

Worked, one thread of a 2.3 GHz Sapphire Rapids, SmolLM2's layers at 512 and at 2048 rows: products 150 to 160 Gflop/s
at every shape of the layer, attention 57 forward and 65 backward, sums 19 GB/s, softmax 10, norms 12, AdamW 13; mapped
pages 2.7 GB/s. The sum of the classes was within 6 % of the step's processor time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from skimp.core.memory.tracker import current
from skimp.core.repeat import times
from skimp.kernels.sparse_attention import visited

#: Parts of the names of operators that compute on the way.
DENSE = (
    "softmax", "amax", "exp", "tanh", "gelu", "silu", "norm", "rsqrt", "pow", "log", "mean", "skimp::", "cat", "clone",
    "neg", "slice_backward", "zeros", "gather", "scatter", "index", "cos", "sin", "sigmoid",
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, by class of operator.

    Attributes:
        flops: operations in matrix products.
        bandwidth: bytes of plain streams.
        source: where the figures are from.
        near: on a CPU a folder on the disk that offloaded tensors would go to; empty for a card (`plan.transfers`).
        attention: operations in attention calls; None: as products.
        dense: bytes of streams that compute on the way; None: as plain ones.
        update: bytes of the update rule's operators; None: as dense streams.
        call: seconds of any call.
        fault: seconds a byte of fresh memory costs where freed memory was given back to the system.
    """

    flops: float
    bandwidth: float
    source: str
    near: str = ""
    attention: float | None = None
    dense: float | None = None
    update: float | None = None
    call: float = 0.0
    fault: float = 0.0

    def seconds(self, name: str, phase: str, flops: int, traffic: int) -> float:
        """One call of operator `name` in a phase of the step."""
        dense = self.dense or self.bandwidth
        if flops:
            rate = self.flops if "attention" not in name else self.attention or self.flops
            return self.call + max(flops / rate, traffic / self.bandwidth)
        if phase == "optimizer" and "::mul_" not in name:
            return self.call + traffic / (self.update or dense)
        return self.call + traffic / (dense if any(part in name for part in DENSE) else self.bandwidth)


@dataclass
class CostMeter:
    """Adds up the seconds of every operator it is shown: what a `Tracker` calls as its observer.

    Attributes:
        rates: the device's.
        on: whether to count; a simulation of several steps counts the last.
        sums: [seconds, operations, bytes of results allocated anew] of what a step does once (the update), then of each
            micro-batch of each pass.
        traffic: bytes in and out of all calls.
        by_owner: seconds in forward and backward by the owner at work.
    """

    rates: Rates
    on: bool = True
    sums: list[list[Any]] = field(default_factory=lambda: [[0.0, 0, 0]])
    traffic: int = 0
    by_owner: dict[str, float] = field(default_factory=dict)
    _phase: str = ""

    def __call__(self, func: Any, args: Any, out: Any) -> None:
        if not self.on or func.is_view:
            return
        name, results = func._schema.name, out if isinstance(out, (tuple, list)) else (out,)
        tracker = current()
        phase = tracker.phase if tracker is not None else ""
        made, often = _bytes(results), times()
        flops, traffic = _flops(name, args), _bytes(args) + made
        self.traffic += often * traffic
        if phase in ("forward", "backward"):
            if phase == "forward" != self._phase:
                self.sums.append([0.0, 0, 0])
            self._phase, into = phase, self.sums[-1]
        else:
            into = self.sums[0]
        spent = often * self.rates.seconds(name, phase, flops, traffic)
        into[0] += spent
        if into is not self.sums[0] and tracker is not None:
            self.by_owner[tracker.owner] = self.by_owner.get(tracker.owner, 0.0) + spent
        into[1] += often * flops
        into[2] += 0 if func._schema.is_mutable else often * made

    @property
    def seconds(self) -> float:
        """Of what was simulated so far."""
        return float(sum(part[0] for part in self.sums))

    def of_step(self, micro_batches: int) -> tuple[float, int, int]:
        """Seconds, operations and fresh bytes of a whole step; the last micro-batch simulated stands for all after."""
        more = max(0, micro_batches - len(self.sums) + 1)
        last = self.sums[-1] if len(self.sums) > 1 else (0.0, 0, 0)
        seconds, flops, fresh = (
            sum(part) + more * end for part, end in zip(zip(*self.sums, strict=True), last, strict=True)
        )
        return seconds, flops, fresh


def _bytes(values: Any) -> int:
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, (tuple, list)):
            total += _bytes(value)
    return total


#: Where the device's attention has the longest document's length, as `core.cuda_attention` calls it.
_LONGEST = {
    "aten::_flash_attention_forward": 5,
    "aten::_flash_attention_backward": 8,
    "aten::_efficient_attention_forward": 6,
    "skimp::efficient_attention_backward": 9,
}


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
    if name in ("skimp::sparse_attention", "skimp::sparse_attention_backward"):
        query, key = args[0], args[1] if len(args) == 5 else args[2]
        return int((4 if len(args) == 5 else 10) * visited(key.shape[1], query.shape[2], args[-1]) * query.numel())
    place = _LONGEST.get(name)
    if place is not None:
        backward = "backward" in name
        return (5 if backward else 2) * args[1 if backward else 0].numel() * args[place]
    return 0
