"""The lattice of exact choices that a search walks, as a list of axes.

A *root* is a number of rows per micro-batch with gradients held or stepped in backward; it is simulated on its own.
Every other choice is an `Axis` that varies a root: its values, from the fastest to the one that takes the least memory,
and what it touches, which says how much must be simulated again. On top of all, each point recomputes some number of
blocks, for which nothing is simulated at all (`plan.extend`). A new technique is one more `Axis` and a field of
`ExactChoices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from skimp.activations.chunked_mlp import has_mlp
from skimp.core.exact import ExactChoices
from skimp.losses import default_rows
from skimp.run.build_checks import adds_up, asks_compact, basis_of_gradients, draws_codes, draws_points, keeps_attention
from skimp.run.techniques import uses_fused

#: "outside": only bytes and seconds outside the blocks change; "recomputed": those of recomputed blocks as well; "all".
Touches = Literal["outside", "recomputed", "all"]
#: Fewest rows of logits in a chunk: below, each product waits for the weight gradient it reads and writes.
SMALL_CHUNK = 64
#: Tokens of an MLP's chunk.
MLP_CHUNK = 1024


@dataclass(frozen=True)
class Space:
    """What an axis may look at: the run and where it is planned for."""

    recipe: Any
    config: Mapping[str, Any]
    blocks: int
    target: str


@dataclass(frozen=True)
class Axis:
    """One exact choice.

    Attributes:
        name: the field of `ExactChoices`, and of the recipe's `exact:` that pins it.
        touches: what changes with it.
        values: those worth trying for a root, from the fastest to the least memory; the field's default is among them.
    """

    name: str
    touches: Touches
    values: Callable[[Space, ExactChoices], Sequence[Any]]

    def default(self) -> Any:
        """The value that roots have."""
        return getattr(ExactChoices(1), self.name)


def loss_chunks(space: Space, root: ExactChoices) -> list[int | None]:
    """All tokens at once, four times the head's own rule, the rule (None), and the smallest.

    Every chunk reads and writes the head's weight gradient once, so larger ones are faster; the logits of one chunk
    exist at once. Not on a CPU: logits beyond its caches cost more than that saves (SmolLM2, 1,024 tokens at once: 2.06
    seconds of one thread a step, where the rule's 256 took 1.81).
    """
    tokens = root.micro_rows * space.recipe.data.seq_len
    hidden = int(space.config.get("hidden_size") or space.config.get("n_embd") or 1)
    own = default_rows(tokens, hidden, int(space.config["vocab_size"]))
    larger = [n for n in (tokens, 4 * own) if own < n <= tokens and space.target != "cpu"]
    return [*dict.fromkeys(larger), None, *([SMALL_CHUNK] if own > SMALL_CHUNK else [])]


def keeps(space: Space, root: ExactChoices) -> list[str]:
    """What recomputed blocks keep. Where norms and activations are fused, "products" keeps what they re-make anyway;
    attention in more operators than one has no result to keep."""
    fused = space.target == "cpu" and uses_fused(space.recipe)
    whole = all(keeps_attention(space.recipe, dict(space.config), space.target))
    return [*([] if fused else ["products"]), *(["attention"] if whole else []), "nothing"]


def mlp_chunks(space: Space, root: ExactChoices) -> list[int | None]:
    """All tokens at once, or 1,024: wide enough for products to run at their rate, and at 16,384 tokens a sixteenth of
    the MLP's insides. None where the model has no MLP that runs alone, or no more tokens than that."""
    tokens = root.micro_rows * space.recipe.data.seq_len
    # The factors of a gradient are handed on a chunk at a time.
    whole = basis_of_gradients(space.recipe) or (asks_compact(space.recipe) and root.in_backward)
    can = has_mlp(space.config) and not whole and not draws_codes(space.recipe)
    return [None, *([MLP_CHUNK] if can and tokens > MLP_CHUNK else [])]


AXES: tuple[Axis, ...] = (
    Axis("loss_chunk", "outside", loss_chunks),
    Axis("keep", "recomputed", keeps),
    Axis("mlp_chunk", "all", mlp_chunks),
)


class Lattice:
    """The points that a recipe's pins leave free.

    Args:
        space: the run.
        axes: its axes beside the roots and the recomputed blocks.
    """

    def __init__(self, space: Space, axes: Sequence[Axis] = AXES) -> None:
        self.space, self.axes = space, tuple(axes)

    def sizes(self) -> list[int]:
        """Micro-batch sizes, smallest first: the pinned one, or the divisors of the step's rows.

        With bases of compact gradients all rows at once unless pinned: they are else of the first micro-batch. And with
        tokens that stand for others, which are a micro-batch's.
        """
        pins, rows = self.space.recipe.exact, self.space.recipe.rows_per_step
        if pins.micro_batch:
            return [min(pins.micro_batch, rows)]
        if basis_of_gradients(self.space.recipe) or draws_points(self.space.recipe):
            return [rows]
        return [n for n in range(1, rows + 1) if rows % n == 0]

    def roots(self, in_backward: bool) -> Iterator[ExactChoices]:
        """Smallest micro-batch first; in backward takes all rows at once. Pinned axes have their values already.

        A smaller micro-batch in backward is taken where both are pinned and the rule can add up: its bases are then of
        the first micro-batch, which is the user's to choose.
        """
        pinned = {axis.name: value for axis in self.axes if (value := self.pinned(axis)) is not None}
        rows = self.space.recipe.rows_per_step
        if not in_backward:
            yield from (ExactChoices(size, **pinned) for size in self.sizes())
        elif self.sizes()[-1] == rows:
            yield ExactChoices(rows, in_backward=True, **pinned)
        elif self.space.recipe.exact.in_backward and self.space.recipe.exact.micro_batch and adds_up(self.space.recipe):
            yield ExactChoices(self.sizes()[0], in_backward=True, **pinned)

    def pinned(self, axis: Axis) -> Any:
        """The recipe's value of an axis; None leaves it free."""
        return getattr(self.space.recipe.exact, axis.name)

    def root(self, row: ExactChoices) -> ExactChoices:
        """The root of a row: the same, with every free axis at its default."""
        free = {axis.name: axis.default() for axis in self.axes if self.pinned(axis) is None}
        return replace(row, recompute=(), malloc="return", **free)

    def changes(self, row: ExactChoices) -> list[tuple[Axis, Any]]:
        """Which axes of a row differ from its root, with their values."""
        root = self.root(row)
        return [(a, getattr(row, a.name)) for a in self.axes if getattr(row, a.name) != getattr(root, a.name)]

    def values(self, axis: Axis, root: ExactChoices) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        """(faster values, the default, values of less memory) of an axis for a root; a pinned axis has one value."""
        pinned = self.pinned(axis)
        if pinned is not None:
            return (), pinned, ()
        found = list(axis.values(self.space, root))
        at = found.index(axis.default())
        return found[:at][::-1], found[at], found[at + 1 :]

    def least(self, root: ExactChoices) -> ExactChoices:
        """The row of a root that takes the least memory."""
        ends = {axis.name: ([self.values(axis, root)[1], *self.values(axis, root)[2]])[-1] for axis in self.axes}
        return replace(root, **ends)

    def rows(self, root: ExactChoices, tried: Mapping[str, Sequence[Any]]) -> Iterator[ExactChoices]:
        """All rows of a root over the values `tried` of each axis."""
        for values in product(*(tried[axis.name] for axis in self.axes)):
            yield replace(root, **{axis.name: value for axis, value in zip(self.axes, values, strict=True)})

    def everywhere(self) -> Iterator[ExactChoices]:
        """Every row there is: what a complete frontier walks, and brute force."""
        pinned = self.space.recipe.exact.in_backward
        for in_backward in (False, True) if pinned is None else (pinned,):
            for root in self.roots(in_backward):
                ends = {axis.name: self.values(axis, root) for axis in self.axes}
                yield from self.rows(root, {n: (*faster, own, *less) for n, (faster, own, less) in ends.items()})
