"""The layer-sampled step: the first-order step on the blocks that are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from skimp.core.batch import Batch
from skimp.core.gradients import Delivery
from skimp.steps.first_order import FirstOrder, StepResult
from skimp.steps.layers import LayerSampler


class LayerSampled(FirstOrder):
    """One optimizer step on a few blocks.

    Args:
        loss, delivery: as `FirstOrder`; the delivery's update rule is `sampler`.
        sampler: freezes and thaws.
    """

    def __init__(self, loss: Callable[[Batch, int], Tensor], delivery: Delivery, sampler: LayerSampler) -> None:
        super().__init__(loss, delivery)
        self.sampler = sampler

    def step(self, micro_batches: Sequence[Batch]) -> StepResult:
        self.sampler.begin(self.delivery.step_index, micro_batches)
        return super().step(micro_batches)
