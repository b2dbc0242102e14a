"""What a process takes beside its tensors once it trains: the plan's allowance, by what it is made of.

Measured as (resident peak - baseline - tensors) over the runs of `benchmarks/accuracy.py`, and set above all that was
seen of them (docs/accuracy.md says which). Of it are: freed blocks that wait in the pool; Python's objects and
autograd's nodes, which grow with the blocks of the model and once more with an adapter in each; buffers that a matrix
product keeps on every thread; what oneDNN keeps for products in bfloat16; and a share of the tensors for pages that are
not whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skimp.core.memory.process import Policy

#: Fixed bytes and a share of the tracked peak, by policy. Under "pool" 10 to 21 MB were taken beside waiting blocks,
#: under "return" 12 to 27 MB in all; "reuse" leaves holes in the heap: 336 MB at 2.22 GB of SmolLM2.
BASE: dict[Policy, tuple[int, float]] = {
    "pool": (24_000_000, 0.005),
    "return": (34_000_000, 0.010),
    "reuse": (150_000_000, 0.09),
}
#: Where the policy cannot be set (no glibc), freed tensors stay in the heap: about 300 MB on the quickstart.
NO_POLICY = (300_000_000, 0.05)
#: Freed blocks that may wait for the next tensors when the live ones are at their peak. Nearly every run fills it, and
#: no run of the table was slower for it: the sizes of a step are few, and come back.
POOL_ROOM = 32_000_000
#: For each block of the model, and once more where an adapter is in it: 0.3 MB were taken, 0.5 MB with 8-bit states.
PER_BLOCK = 500_000
#: For each thread beyond the first: 25 MB were taken (MKL packs both factors of its largest product).
PER_THREAD = 27_000_000
#: With products in bfloat16: 17 MB were taken.
BFLOAT16 = 20_000_000


@dataclass(frozen=True)
class Shape:
    """What the allowance depends on beside the tensors: blocks of the model, torch's threads, precision, an adapter."""

    blocks: int = 32
    threads: int = 1
    bfloat16: bool = False
    adapter: bool = False

    @classmethod
    def of_record(cls, row: Mapping[str, Any]) -> Shape:
        """Of a line of the log (`plan.history`)."""
        shape = row["shape"]
        return cls(
            int(shape.get("blocks") or 32),
            int(row["versions"].get("threads") or 1),
            shape.get("precision", "fp32") != "fp32",
            shape.get("adapter") is not None,
        )


def allowance(policy: Policy, shape: Shape, set_here: bool = True) -> tuple[int, float]:
    """(fixed bytes, share of the tracked peak) beside the baseline and the tensors themselves.

    Args:
        policy: what the allocator does with freed memory.
        shape: of the run.
        set_here: whether the policy is in force; else glibc's own rules, or another C library's.
    """
    fixed, share = BASE[policy] if set_here else NO_POLICY
    fixed += PER_BLOCK * shape.blocks * (2 if shape.adapter else 1) + PER_THREAD * max(0, shape.threads - 1)
    fixed += BFLOAT16 if shape.bfloat16 else 0
    fixed += POOL_ROOM if policy == "pool" and set_here else 0
    return fixed, share


def beside(tracked: int, policy: Policy, shape: Shape, set_here: bool = True) -> int:
    """Bytes beside the process's own for a tracked peak: the tensors and the allowance."""
    fixed, share = allowance(policy, shape, set_here)
    return fixed + int(tracked * (1 + share))
