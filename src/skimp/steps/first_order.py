"""The first-order step: forward and backward of every micro-batch, then final gradients to the update rule.

Every loss divides by the trained tokens of the *whole* step, counted on the host before the first forward; so how
the step is cut into micro-batches changes memory and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from skimp.core.batch import Batch
from skimp.core.errors import DataError, NonFiniteError
from skimp.core.gradients import Delivery
from skimp.core.memory.process import trim
from skimp.core.memory.tracker import scope
from skimp.core.position import declared_position
from skimp.core.read import read


@dataclass(frozen=True)
class StepResult:
    """loss: mean over the step's trained tokens; grad_norm: global norm before clipping; trained: tokens."""

    loss: float
    grad_norm: float
    clip_scale: float
    trained: int


class FirstOrder:
    """One optimizer step by backpropagation.

    Args:
        loss: (micro-batch, normaliser) -> scalar loss whose gradient is this micro-batch's share.
        delivery: how final gradients reach the update rule.
    """

    def __init__(self, loss: Callable[[Batch, int], Tensor], delivery: Delivery) -> None:
        self.loss = loss
        self.delivery = delivery
        self.forwards = 0

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Run all passes over the micro-batches and move the parameters once.

        Raises:
            DataError: nothing to train on in the whole step.
            NonFiniteError: the loss or a gradient is not finite; with gradients held, no parameter has moved.
        """
        trained = sum(batch.trained for batch in micro_batches)
        if trained == 0:
            raise DataError(
                f"at least one trained token in optimizer step {self.delivery.step_index + 1}",
                "none",
                "a loss over nothing would read 0.0 and train nothing",
                "raise data.seq_len or check the data's labels",
            )
        delivered = None
        loss = 0.0
        for index in range(self.delivery.passes):
            self.delivery.begin(index, len(micro_batches))
            total: Tensor | None = None
            first_row = 0
            for batch in micro_batches:
                place = declared_position(self.delivery.step_index, first_row)
                first_row += batch.rows
                with place, scope("activations", "forward"):
                    share = self.loss(batch, trained)
                total = share.detach() if total is None else total + share.detach()
                if self.delivery.passes == 1 and len(micro_batches) == 1:
                    loss = self._checked(total)
                with scope("activations", "backward"):
                    share.backward()  # type: ignore[no-untyped-call]
                # Gradients and what they were made from leave holes of every size: give whole pages back.
                trim()
                self.forwards += 1
                del share
            assert total is not None
            loss = self._checked(total)
            delivered = self.delivery.end(index)
        assert delivered is not None
        return StepResult(loss, delivered.norm, delivered.scale, trained)

    def _checked(self, total: Tensor) -> float:
        loss = read(total, expect=1.0)
        if loss != loss or abs(loss) == float("inf"):
            raise NonFiniteError(
                f"a finite loss in optimizer step {self.delivery.step_index + 1}",
                f"{loss}",
                "the forward pass overflowed or met a NaN weight",
                "lower train.lr, lengthen train.warmup, or use precision fp32",
            )
        return loss
