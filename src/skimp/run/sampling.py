"""The next token from its logits: penalties, then what is cut off, then one draw; the same for the same seed.

Order and definitions are those of `transformers`' generation: repetition penalty (Keskar et al., "CTRL", 2019,
section 4.1), temperature, top-k (Fan et al., 2018), top-p (Holtzman et al., "The Curious Case of Neural Text
Degeneration", 2020, section 3.1), min-p (Nguyen et al., "Turning Up the Heat", 2024, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skimp.core.errors import RecipeError
from skimp.core.noise import uniform
from skimp.core.read import read


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the largest logit always (greedy) and draws nothing.
        top_p: keep the most likely tokens until their mass reaches this; 1 keeps all.
        top_k: keep so many; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest; 0 drops none.
        repetition_penalty: above 1 makes tokens of the text so far less likely; 1 leaves them.
        seed: of the draws; (seed, number of the text, position) addresses each.

    Raises:
        RecipeError: a value out of its range, or one that greedy choice would ignore.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, right, range_ in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            ("top-p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top-k", self.top_k >= 0, "0 (all) or more"),
            ("min-p", 0 <= self.min_p < 1, "0 (none) or more, below 1"),
            ("repetition-penalty", 0 < self.repetition_penalty < float("inf"), "above 0; 1 for none"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not right:
                raise RecipeError(f"--{name}: {range_}", f"{getattr(self, name.replace('-', '_'))}")
        cut = [n for n, on in (("top-p", self.top_p < 1), ("top-k", self.top_k), ("min-p", self.min_p)) if on]
        if self.temperature == 0 and cut:
            raise RecipeError(
                f"--{cut[0]} at temperature 0",
                "greedy choice",
                "the likeliest token is taken whatever is cut off, so the option would be ignored",
                ["--temperature 0.7", f"leave --{cut[0]} out"],
            )

    def choose(self, logits: Tensor, text: Sequence[int], number: int = 0) -> int:
        """The id of the next token.

        Args:
            logits: (vocabulary,) float32; changed in place.
            text: ids so far, prompt included; its length addresses the draw.
            number: of the text among several, so that each has draws of its own.
        """
        if self.repetition_penalty != 1.0 and text:
            seen = torch.tensor(sorted(set(text)), device=logits.device)
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
        if self.temperature == 0:
            return int(read(logits.argmax(), expect=0.0))
        chances, order = self.chances(logits)
        mass = chances.double().cumsum(0)
        drawn = uniform(self.seed, "generate", len(text), 1, stream=number, device=logits.device).double()
        # The first token whose cumulated mass exceeds the draw; a draw of 1 - 2**-24 at most stays inside.
        place = torch.searchsorted(mass, drawn * mass[-1], right=True).clamp_(max=len(order) - 1)
        return int(read(order[place], expect=0.0))

    def chances(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(probabilities, ids) of the tokens that stay, likeliest first; the probabilities need not sum to 1."""
        ranked, order = torch.sort(logits / self.temperature, descending=True, stable=True)
        if self.top_k:
            ranked, order = ranked[: self.top_k], order[: self.top_k]
        chances = torch.softmax(ranked, 0)
        stays = torch.ones_like(chances, dtype=torch.bool)
        if self.top_p < 1:
            # A token stays while the mass before it is short of top_p: the likeliest always does.
            stays &= chances.cumsum(0) - chances < self.top_p
        if self.min_p:
            chances = torch.where(stays, chances, 0.0)
            stays &= chances >= self.min_p * chances[0]
        return torch.where(stays, chances, 0.0), order
