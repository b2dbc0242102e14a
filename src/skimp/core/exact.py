"""The exact choices of a run: everything the planner may set freely, because the mathematics stays the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from skimp.core.memory.process import Policy

#: Outside the computing memory, and anywhere.
Place = Literal["host", "disk"]
Residence = Literal["device", "host", "disk"]
#: What a block that is run again in backward keeps besides its input (`activations.selective`).
Keep = Literal["nothing", "attention", "products"]
KEPT = {"attention": "their attention", "products": "their matrix products"}


@dataclass(frozen=True)
class ExactChoices:
    """One point of the lattice that the search walks.

    Attributes:
        micro_rows: rows of seq_len tokens that go through the model at once.
        recompute: indices of the blocks that are run again in backward.
        loss_chunk: tokens whose logits exist at once; None for the head's own rule.
        in_backward: update each parameter inside backward and free its gradient.
        keep: what the recomputed blocks keep all the same: nothing, the attention's output, or that of every product.
        malloc: what the host's allocator does with freed memory (`core.memory.process`); moot on a card.
        offload: indices of the blocks whose kept activations wait in `offload_to` until backward.
        offload_to: "host" or "disk".
        states: where optimizer states live: "device", "host" or "disk".
    """

    micro_rows: int
    recompute: tuple[int, ...] = ()
    loss_chunk: int | None = None
    in_backward: bool = False
    malloc: Policy = "return"
    offload: tuple[int, ...] = ()
    offload_to: Place = "disk"
    states: Residence = "device"
    keep: Keep = "nothing"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "recompute": list(self.recompute), "offload": list(self.offload)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ExactChoices:
        """The inverse of `as_dict`."""
        return cls(
            int(values["micro_rows"]),
            tuple(values["recompute"]),
            values.get("loss_chunk"),
            bool(values["in_backward"]),
            values.get("malloc", "return"),
            tuple(values.get("offload", ())),
            values.get("offload_to", "disk"),
            values.get("states", "device"),
            values.get("keep", "nothing"),
        )

    def describe(self, blocks: int, rows: int) -> str:
        """'micro-batch 1 of 4 rows, recompute 30 of 30 blocks, gradients held' for a person."""
        kept = "no recompute" if not self.recompute else f"recompute {len(self.recompute)} of {blocks} blocks"
        if self.recompute and self.keep != "nothing":
            kept += f" but {KEPT[self.keep]}"
        chunk = f", loss in chunks of {self.loss_chunk} tokens" if self.loss_chunk else ""
        held = "step in backward" if self.in_backward else "gradients held"
        away = f", {len(self.offload)} blocks' activations on {self.offload_to}" if self.offload else ""
        states = "" if self.states == "device" else f", optimizer states on {self.states}"
        return f"micro-batch {self.micro_rows} of {rows} rows, {kept}, {held}{chunk}{away}{states}"
