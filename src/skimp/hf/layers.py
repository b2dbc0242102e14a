"""Layer-sampled training inside Hugging Face `Trainer`: a callback, as its users know them."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from skimp.core.errors import ConflictError
from skimp.core.structure import read_structure, trainable
from skimp.steps.draws import Draw
from skimp.steps.layers import LayerSampler, Policy


class SampledLayers(TrainerCallback):
    """`Trainer(..., callbacks=[SampledLayers(...)])`: the blocks that `draw` names train for `every` optimizer steps.

    The optimizer is made while everything trains, and freezing begins with the first step, so that a block which is
    drawn late is known to it. Accumulation and resuming need nothing more: a step's blocks follow from its number.

    Args:
        draw: `skimp.steps.Uniform`, `Ordered`, or `Systematic` over `skimp.steps.outlier_scores`.
        every, on_switch, embeddings, head: as `skimp.steps.LayerSampler`. There is no warm-up here: the trainer's
            optimizer takes all parameters of a group at one rate.

    Raises:
        ConflictError: when training begins, under more than one process: their gradient buckets are laid out once, for
            a set of parameters that does not change.
    """

    def __init__(
        self, draw: Draw, *, every: int, on_switch: Policy = "drop", embeddings: bool = True, head: bool = True
    ) -> None:
        self.draw, self.every = draw, every
        self.options: dict[str, Any] = {"on_switch": on_switch, "embeddings": embeddings, "head": head}
        self.sampler: LayerSampler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:
            raise ConflictError(
                "layer-sampled training in Trainer",
                f"{args.world_size} processes",
                "gradients are exchanged in buckets that are laid out once, for parameters that always train",
                "one process",
            )
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper holds the one with the states
        self.sampler = LayerSampler(
            list(trainable(model)), read_structure(model), optimizer, self.draw, every=self.every, **self.options
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.sampler is not None
        self.sampler.begin(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sampler is not None:
            self.sampler.release()
