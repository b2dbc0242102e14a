"""`budget:` and `exact:` — what the run may use, and which exact techniques are pinned, not planned."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

from skimp.core.errors import did_you_mean
from skimp.recipe.fields import Flag, Section, Size, Whole, Words, refuse, whole


class Budget(Section):
    """Most bytes in each place. `budget: 2GB` is short for the place the run computes in; null means all
    there is.

    On a CPU the host figure is for the whole process, the interpreter and its libraries included.
    """

    device: Size | None = Field(default=None, description="Memory of each accelerator; null takes what is free on it.")
    host: Size | None = Field(default=None, description="Main memory of the process; null takes what is available.")
    disk: Size | None = Field(
        default=None, description="Disk for checkpoints and offloaded tensors; null takes what is free."
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        section = handler.resolve_ref_schema(handler(schema))
        keep: dict[str, Any] = {key: section[key] for key in ("title", "description") if key in section}
        return {**keep, "anyOf": [{"type": ["string", "integer"]}, section]}


def _recompute(value: Any) -> Any:
    """none | all | how many blocks | which blocks; None leaves it to the planner."""
    expected = "none, all, a number of blocks, or a list of block indices"
    if value is None or value in ("none", "all"):
        return value
    if isinstance(value, (list, tuple)):
        try:
            blocks = [whole(v) for v in value]
        except PydanticCustomError:
            raise refuse(expected, "write recompute: [0, 1, 5]") from None
        if any(b is None or b < 0 for b in blocks):
            raise refuse(expected, "block indices start at 0")
        return tuple(sorted(set(blocks)))
    try:
        count = whole(value)
    except PydanticCustomError:
        near = did_you_mean(value, ("none", "all")) if isinstance(value, str) else "write recompute: all"
        raise refuse(expected, near) from None
    if count < 0:
        raise refuse(expected, "write 0 or none to keep every activation")
    return count


Recompute = Annotated[
    Literal["none", "all"] | int | tuple[int, ...] | None,
    BeforeValidator(_recompute),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "all", None]},
                {"type": "integer", "minimum": 0},
                {"type": "array", "items": {"type": "integer", "minimum": 0}},
            ]
        }
    ),
]


#: What a recomputed block may keep.
KEPT = ("nothing", "attention", "products")


def _keep(value: Any) -> Any:
    """A word for all recomputed blocks, or a list with one for each."""
    words = value if isinstance(value, (list, tuple)) else [value]
    wrong = next((word for word in words if word not in (*KEPT, None)), None)
    if wrong is not None or (None in words and value is not None) or not words:
        near = did_you_mean(wrong, KEPT) if isinstance(wrong, str) else "write keep: [nothing, attention]"
        raise refuse(f"{', '.join(KEPT)}, or a list of them", near)
    return tuple(words) if isinstance(value, (list, tuple)) else value


Kept = Annotated[
    Literal["nothing", "attention", "products"] | tuple[str, ...] | None,
    BeforeValidator(_keep),
    WithJsonSchema({"anyOf": [{"enum": [*KEPT, None]}, {"type": "array", "items": {"enum": list(KEPT)}}]}),
]


class Offload(Section):
    """What may wait outside the memory the run computes in. null leaves it to the planner; none pins it here.

    On a CPU there is the disk; on a card host memory is nearer.
    """

    activations: Literal["none", "host", "disk"] | None = Field(
        default=None, description="Where tensors kept for backward wait."
    )
    blocks: Recompute = Field(
        default=None,
        description="Blocks whose tensors wait there: all, a count (the first ones), or a list of indices; needs "
        "activations.",
    )
    optimizer: Literal["none", "host", "disk"] | None = Field(
        default=None, description="Where optimizer states live between updates."
    )
    folder: Words | None = Field(
        default=None, description="Folder on a disk for what waits there; null is offload/ in the run's output."
    )


class Exact(Section):
    """Techniques that leave the mathematics alone. null lets the planner choose; a value pins it."""

    micro_batch: Whole | None = Field(default=None, ge=1, description="Rows that go through the model at once.")
    recompute: Recompute = Field(
        default=None,
        description="Blocks whose activations are re-made in backward: none, all, a count, or a list of indices.",
    )
    keep: Kept = Field(
        default=None,
        description="What recomputed blocks keep besides their input, and do not make again: nothing, the attention's "
        "output (attention), or the output of every matrix product (products). One word for all, or a list with one "
        "for each block that recompute names, in ascending order.",
    )
    loss_chunk: Whole | None = Field(
        default=None, ge=1, description="Rows of the logits that exist at once in the loss head."
    )
    mlp_chunk: Whole | None = Field(
        default=None,
        ge=1,
        description="Tokens that a block's MLP runs over at once: its insides are made again in backward, chunk by "
        "chunk.",
    )
    in_backward: Flag | None = Field(
        default=None,
        description="Step each parameter as soon as its gradient is final, and free the gradient.",
    )
    offload: Offload = Field(default_factory=Offload, description="What waits on disk or in host memory.")
    kernels: Literal["fused", "plain"] | None = Field(
        default=None,
        description="Norms, activations and rotary positions on a CPU: fused is skimp's native form, plain the model's "
        "own; null is fused in float32 where the native kernels are built; bfloat16 is fused only when asked for.",
    )
    malloc: Literal["pool", "return", "reuse"] | None = Field(
        default=None,
        description="What a CPU run does with freed memory: pool keeps blocks for the next tensors, within the "
        "plan's limit; return gives it back to the system at once; reuse keeps blocks under 4 MiB on the heap. null is "
        "pool where it is built, else whichever of the others fits and is faster.",
    )
