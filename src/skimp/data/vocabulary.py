"""Token ids and the model's embedding: told apart before the first step, not by a crash in it."""

from __future__ import annotations

from skimp.core.errors import ModelError


def check_vocabulary(highest: int, tokenizer_size: int, vocabulary: int, where: str) -> None:
    """Refuse tokens the model has no embedding for.

    Raises:
        ModelError: names both sizes.
    """
    if highest >= vocabulary:
        raise ModelError(
            f"a model with {vocabulary} token embeddings",
            f"token id {highest} in {where}; the tokenizer has {tokenizer_size} tokens",
            "an id beyond the embedding has no row there",
            ["use the tokenizer that belongs to the model", f"give the model {tokenizer_size} embeddings"],
        )
