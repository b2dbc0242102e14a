"""The tensors of an export: names as transformers writes them, tied ones once, each cast when its turn comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.errors import ModelError, did_you_mean
from skimp.core.read import read
from skimp.run.found import Found
from skimp.run.opened import settle_dtype
from skimp.run.skeleton import skeleton
from skimp.run.stored import names_for
from skimp.run.tensor_bytes import Later, Spec
from skimp.run.weights import owners

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Layout:
    """What will be written.

    Attributes:
        skeleton: the model without storage.
        tensors: name -> a tensor to be made later, in model order; a tied tensor under its first name only.
        dtype: of the floating tensors.
        tied: the head's weight is the embedding's.
    """

    skeleton: nn.Module
    tensors: dict[str, Later]
    dtype: torch.dtype
    tied: bool

    @property
    def nbytes(self) -> int:
        return sum(t.spec.nbytes for t in self.tensors.values())


def lay_out(found: Found, dtype: str | None) -> Layout:
    """Names, shapes and makers of all tensors; nothing is read yet.

    Args:
        dtype: "fp32", "bf16" or "fp16"; None keeps what the weights were computed in.

    Raises:
        ModelError: an unknown dtype; a missing or misshapen tensor, by name.
        ConflictError: an adapter that is no change of weights.
    """
    found.weights_alone(f"one set of weights for {found.asked}")
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"--dtype {dtype}", "unknown", instead=did_you_mean(dtype, DTYPES))
    kind = DTYPES[dtype] if dtype is not None else settle_dtype(found, None)
    model = skeleton(found.config, torch.float32)
    targets: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    owner = owners(model)
    written: dict[str, str] = {}
    for known, name in names_for(found.stored, targets).items():
        if known == owner[known] or owner[known] not in written:
            written[owner[known]] = name
    specs = found.stored.specs()
    firsts = [name for name in targets if owner[name] == name]
    wrong = [n for n in firsts if n not in written or specs[written[n]].shape != tuple(targets[n].shape)]
    if wrong:
        raise ModelError(
            f"tensors of {found.asked}",
            f"{len(wrong)} missing or of another shape than the config's: {', '.join(wrong[:5])}",
            "an export without them would start from random numbers there",
            "the config that belongs to these weights",
        )
    tensors = {n: Later(Spec(kind, tuple(targets[n].shape)), _maker(found, n, written[n], kind)) for n in firsts}
    whole: Any = model
    head = whole.get_output_embeddings()
    tied = head is not None and head.weight is whole.get_input_embeddings().weight
    return Layout(model, tensors, kind, tied)


def _maker(found: Found, name: str, written: str, kind: torch.dtype) -> Callable[[], Tensor]:
    def make() -> Tensor:
        value = found.stored.read(written)
        cast = value.to(kind)
        if kind == torch.float16:
            check_range(name, value, cast)
        return cast

    return make


def check_range(name: str, value: Tensor, cast: Tensor) -> None:
    """Half precision ends at 65,504.

    Raises:
        ModelError: a finite weight became infinite.
    """
    # `any` and not `sum`, which would make eight bytes of every truth value.
    infinite = torch.isinf(cast)
    if read(infinite.any(), expect=0.0) and read(torch.isfinite(value[infinite]).any(), expect=0.0):
        largest = read(value.abs().max(), expect=0.0)
        raise ModelError(
            f"{name} in half precision",
            f"a weight of {largest:.3g}",
            "float16 ends at 65,504: it would become infinite",
            "--dtype bf16, or fp32",
        )
