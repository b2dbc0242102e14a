"""From a batch to its loss: final hidden states, then the chunked head; gradients of a tied weight in place.

HF's own `forward` would build tokens x vocabulary logits. Here the base model gives hidden states and the head's
weight goes to `linear_cross_entropy`. A trained head's gradient (and a tied embedding's) is written into one buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core import attention
from skimp.core.batch import Batch
from skimp.core.memory.process import trim
from skimp.core.memory.tracker import at, scope
from skimp.core.read import is_simulated, read
from skimp.core.structure import Structure
from skimp.losses import linear_cross_entropy, linear_cross_entropy_eval, tied_embedding

#: Elements of a narrow head that are float32 at once, where logits of a few tokens are wanted: 16 MB.
WIDENED = 4 << 20


class Head:
    """The loss of a causal language model, and its evaluation.

    Args:
        model, structure: the policy and its roles.
        chunk: tokens whose logits exist at once; None for the head's own rule.
        autocast: compute in bfloat16 over float32 weights.
        label_smoothing, z_loss: terms of the loss.
        sink: gives the buffer for the head weight's gradient; None when the head is frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        *,
        chunk: int | None = None,
        autocast: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        sink: Callable[[], Tensor | None] | None = None,
    ) -> None:
        self.model = model
        self.structure = structure
        self.chunk = chunk
        self.autocast = autocast
        self.terms: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        self.logits: dict[str, Any] = {
            "softcap": structure.softcap,
            "logit_scale": None if structure.logit_scale == 1.0 else structure.logit_scale,
        }
        self.sink = sink
        self._base = model.get_submodule(structure.base)
        self._head = model.get_submodule(structure.head)
        self._embedding = model.get_submodule(structure.embedding)
        if structure.tied and sink is not None:
            self._embedding.forward = self._embed

    def _embed(self, ids: Tensor) -> Tensor:
        """The tied embedding: its gradient is added into the head's buffer, no second vocabulary-sized tensor."""
        embedding: Any = self._embedding
        buffer = self.sink() if self.sink is not None and torch.is_grad_enabled() and self.model.training else None
        if buffer is None:
            return nn.functional.embedding(ids, embedding.weight, embedding.padding_idx)
        return tied_embedding(ids, embedding.weight, buffer, padding_idx=embedding.padding_idx)

    @property
    def weight(self) -> Tensor:
        """The output projection, (vocabulary, hidden)."""
        return self._head.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The output projection's bias."""
        return self._head.bias  # type: ignore[return-value]

    def hidden(self, ids: Tensor, positions: Tensor, documents: Any) -> Tensor:
        """Final hidden states (rows, seq, hidden); attention inside documents only."""
        at("embedding")
        with attention.declared(documents):
            out = self._base(input_ids=ids, position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _hidden(self, batch: Batch) -> Tensor:
        return self.hidden(batch.ids, batch.positions, batch.documents)

    @torch.no_grad()
    def logits_of(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Float32 logits (rows, seq, vocabulary) of a few tokens, scaled and capped as the loss does."""
        return self.logits_from(self.hidden(ids, positions, None))

    @torch.no_grad()
    def logits_from(self, hidden: Tensor) -> Tensor:
        """The same from final hidden states (rows, seq, hidden)."""
        bias = None if self.bias is None else self.bias.float()
        if self.weight.dtype == torch.float32:
            logits = nn.functional.linear(hidden.float(), self.weight, bias)
        else:
            # A narrow head is widened in slices: its float32 copy, for every token, would be twice its own size.
            head: Any = self.weight
            slices = head.split(max(1, WIDENED // head.shape[1]))
            logits = torch.cat([nn.functional.linear(hidden.float(), w.float()) for w in slices], -1)
            logits = logits if bias is None else logits + bias
        logits = logits * self.structure.logit_scale
        cap = self.structure.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _cast(self) -> Any:
        if not self.autocast:
            return contextlib.nullcontext()
        # The weight cache would hold bf16 copies of every weight until the region ends, beside the ones autograd keeps.
        return torch.autocast(self.weight.device.type, torch.bfloat16, cache_enabled=False)

    def _products(self) -> torch.dtype | None:
        """dtype of the head's matrix products: a card multiplies bfloat16 as it is, a CPU widens it in slices."""
        on_card = self.weight.device.type == "cuda" or attention.target_device() != "cpu"
        return torch.bfloat16 if on_card and self.weight.dtype == torch.bfloat16 else None

    @torch.no_grad()
    def walk(self, batch: Batch) -> None:
        """One forward pass up to the final hidden states, for whoever watches inside; nothing is kept."""
        with self._cast(), scope("activations", "walk"):
            self._hidden(batch)

    def loss(self, batch: Batch, normaliser: int) -> Tensor:
        """This micro-batch's share of the step's loss: sum over its trained tokens / `normaliser`."""
        with self._cast():
            hidden = self._hidden(batch)
            at("loss head")
            if not is_simulated(hidden):
                trim()
            with scope("logits"):
                return linear_cross_entropy(
                    hidden,
                    self.weight,
                    batch.labels,
                    bias=self.bias,
                    compute_dtype=self._products(),
                    token_weights=batch.weights,
                    normaliser=normaliser,
                    chunk_rows=self.chunk,
                    weight_grad_into=self.sink() if self.sink is not None else None,
                    **self.terms,
                    **self.logits,
                )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, float, int]:
        """Mean plain cross-entropy, accuracy and trained tokens over `batches`. Nothing is kept between batches."""
        total = right = 0.0
        tokens = 0
        self.model.eval()
        try:
            for batch in batches:
                with self._cast(), scope("activations", "evaluate"):
                    hidden = self._hidden(batch)
                    with scope("logits"):
                        loss, correct, _ = linear_cross_entropy_eval(
                            hidden,
                            self.weight,
                            batch.labels,
                            bias=self.bias,
                            chunk_rows=self.chunk,
                            compute_dtype=self._products(),
                            **self.logits,
                        )
                total += read(loss, expect=1.0)
                right += read(correct, expect=0.0)
                tokens += batch.trained
                del hidden, loss, correct  # else the last batch's hidden states live beside the next one's
        finally:
            self.model.train()
        return total / max(1, tokens), right / max(1, tokens), tokens

    def close(self) -> None:
        """Give the embedding its own forward back."""
        self._embedding.__dict__.pop("forward", None)
