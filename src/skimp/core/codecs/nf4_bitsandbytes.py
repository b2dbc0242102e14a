"""NF4 parts under the names in which bitsandbytes keeps a 4-bit weight in a state dict, and back, bit by bit.

A weight NAME is there NAME (⌈n/2⌉, 1) with NAME.absmax, NAME.quant_map, with double quantisation NAME.nested_absmax and
NAME.nested_quant_map, and NAME.quant_state.bitsandbytes__nf4: JSON as bytes, with sizes, dtypes and the offset.
Format: bitsandbytes 0.50, `QuantState.as_dict(packed=True)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from skimp.core.codecs.dynamic8_map import codebook as dynamic8
from skimp.core.codecs.nf4 import NESTED, NF4
from skimp.core.codecs.nf4_map import codebook
from skimp.core.errors import SkimpError
from skimp.core.read import read

STATE = "quant_state.bitsandbytes__nf4"


def to_bitsandbytes(
    name: str, parts: Mapping[str, Tensor], codec: NF4, shape: tuple[int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of one weight, by the names they have there.

    Args:
        name: of the weight, such as "model.layers.0.self_attn.q_proj.weight".
        parts, codec: what it is kept in. shape: (outputs, inputs). dtype: what it is to be decoded to.
    """
    facts: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": codec.block,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
    }
    device = parts["codes"].device
    tensors = {"": parts["codes"].view(-1, 1), ".absmax": parts["absmax"], ".quant_map": _table(codebook(), device)}
    if codec.double_quant:
        offset = read(parts["offset"], expect=0.0)
        facts |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {".nested_absmax": parts["nested_absmax"], ".nested_quant_map": _table(dynamic8(True), device)}
    text = numpy.frombuffer(json.dumps(facts).encode(), dtype=numpy.uint8).copy()
    tensors[f".{STATE}"] = torch.from_numpy(text)
    return {name + key: tensor for key, tensor in tensors.items()}


def from_bitsandbytes(name: str, tensors: Mapping[str, Tensor]) -> tuple[NF4, dict[str, Tensor], tuple[int, ...]]:
    """(codec, parts, shape) of the weight `name`; the parts are views of the tensors where they can be.

    Raises:
        SkimpError: no such weight, another 4-bit type, or tables that are not NF4's.
    """
    if f"{name}.{STATE}" not in tensors:
        kinds = [key.rpartition("__")[2] for key in tensors if key.startswith(f"{name}.quant_state")]
        raise SkimpError(f"'{name}' as bitsandbytes keeps NF4", f"4-bit type {kinds[0]}" if kinds else "no quant_state")
    facts = json.loads(tensors[f"{name}.{STATE}"].cpu().numpy().tobytes())
    double = "nested_offset" in facts
    tables = {"quant_map": codebook()} | ({"nested_quant_map": dynamic8(True)} if double else {})
    for key, table in tables.items():
        if not numpy.array_equal(tensors[f"{name}.{key}"].cpu().numpy(), table):
            raise SkimpError(f"'{name}' as bitsandbytes keeps NF4", f"a {key} of its own", "it is not NF4's table")
    if double and facts["nested_blocksize"] != NESTED:
        raise SkimpError(f"'{name}' with maxima in blocks of {NESTED}", f"{facts['nested_blocksize']}")
    parts = {"codes": tensors[name].view(torch.uint8).view(-1), "absmax": tensors[f"{name}.absmax"]}
    if double:
        offset = torch.tensor([facts["nested_offset"]], dtype=torch.float32, device=tensors[name].device)
        parts |= {"nested_absmax": tensors[f"{name}.nested_absmax"], "offset": offset}
    return NF4(int(facts["blocksize"]), double), parts, tuple(facts["shape"])


def _table(values: numpy.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values.copy()).to(device)
