"""The exact choices of a run: everything the planner may set freely, because the mathematics stays the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from skimp.core.memory.process import Policy


@dataclass(frozen=True)
class ExactChoices:
    """One point of the lattice that the search walks.

    Attributes:
        micro_rows: rows of seq_len tokens that go through the model at once.
        recompute: indices of the blocks that are run again in backward.
        loss_chunk: tokens whose logits exist at once; None for the head's own rule.
        in_backward: update each parameter inside backward and free its gradient.
        malloc: what the host's allocator does with freed memory (`core.memory.process`); moot on a card.
    """

    micro_rows: int
    recompute: tuple[int, ...] = ()
    loss_chunk: int | None = None
    in_backward: bool = False
    malloc: Policy = "return"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "recompute": list(self.recompute)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ExactChoices:
        """The inverse of `as_dict`."""
        return cls(
            int(values["micro_rows"]),
            tuple(values["recompute"]),
            values.get("loss_chunk"),
            bool(values["in_backward"]),
            values.get("malloc", "return"),
        )

    def describe(self, blocks: int, rows: int) -> str:
        """'micro-batch 1 of 4 rows, recompute 30 of 30 blocks, gradients held' for a person."""
        kept = "no recompute" if not self.recompute else f"recompute {len(self.recompute)} of {blocks} blocks"
        chunk = f", loss in chunks of {self.loss_chunk} tokens" if self.loss_chunk else ""
        held = "step in backward" if self.in_backward else "gradients held"
        return f"micro-batch {self.micro_rows} of {rows} rows, {kept}, {held}{chunk}"
