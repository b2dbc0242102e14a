"""The exact choices of a run: everything the planner may set freely, because the mathematics stays the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
        mlp_chunk: tokens that a block's MLP runs over at once, forward and backward; None for all.
        keep: what the recomputed blocks keep all the same: nothing, the attention's output, or that of every product;
            one word for all of them, or one each, in the order of `recompute`.
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
    keep: Keep | tuple[Keep, ...] = "nothing"
    mlp_chunk: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        keep = self.keep if isinstance(self.keep, str) else list(self.keep)
        return {**asdict(self), "recompute": list(self.recompute), "offload": list(self.offload), "keep": keep}

    def kept(self) -> dict[int, Keep]:
        """What each recomputed block keeps."""
        words = (self.keep,) * len(self.recompute) if isinstance(self.keep, str) else self.keep
        return dict(zip(self.recompute, words, strict=True))

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
            _keep(values.get("keep", "nothing")),
            values.get("mlp_chunk"),
        )

    def describe(self, blocks: int, rows: int) -> str:
        """'micro-batch 1 of 4 rows, recompute 30 of 30 blocks, gradients held' for a person."""
        kept = "no recompute" if not self.recompute else f"recompute {len(self.recompute)} of {blocks} blocks"
        words = Counter(self.kept().values())
        parts = [KEPT[w] + (f" in {n}" if len(words) > 1 else "") for w, n in words.items() if w in KEPT]
        kept += f" but {', '.join(parts)}" if parts else ""
        chunk = f", loss in chunks of {self.loss_chunk} tokens" if self.loss_chunk else ""
        chunk += f", MLPs in chunks of {self.mlp_chunk} tokens" if self.mlp_chunk else ""
        held = "step in backward" if self.in_backward else "gradients held"
        away = f", {len(self.offload)} blocks' activations on {self.offload_to}" if self.offload else ""
        states = "" if self.states == "device" else f", optimizer states on {self.states}"
        return f"micro-batch {self.micro_rows} of {rows} rows, {kept}, {held}{chunk}{away}{states}"


def _keep(value: Any) -> Keep | tuple[Keep, ...]:
    words: Sequence[Keep] = (value,) if isinstance(value, str) else value  # type: ignore[assignment]
    return one_word(words)


def one_word(words: Sequence[Keep]) -> Keep | tuple[Keep, ...]:
    """What recomputed blocks keep, as one word where it is the same for all."""
    return words[0] if words and len(set(words)) == 1 else tuple(words) or "nothing"
