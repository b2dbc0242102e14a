"""Tensors of a GGUF file under the names and in the layout transformers gives them; and the way back.

llama.cpp names tensors by their part in the computation and interleaves the two halves of every rotary head in the
query and key projections of Llama-shaped models. Both directions live here, so that what is written is what is read.
Names: the GGUF specification's "standardized tensor names" (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import ModelError
from skimp.recipe.gguf_header import read_header
from skimp.run.tensor_bytes import Spec

#: GGUF tensor name inside a block -> HF name inside a block, for the Llama-shaped families.
GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: Families whose query and key rows llama.cpp interleaves; Qwen's rotary halves stay as they are.
INTERLEAVED = ("llama", "mistral")

#: Elements decoded at once, 4 MiB of float32 (and as much again inside the decoder).
DECODED = 1 << 20

_BLOCK_BACK = {hf: name for name, hf in GGUF_BLOCK.items()}
_TOP_BACK = {hf: name for name, hf in GGUF_TOP.items()}


def check_gguf_family(kind: str, asked: str, found: str, instead: str) -> None:
    """Refuse a family whose tensors have no known GGUF names here.

    Raises:
        ModelError: with the families that have.
    """
    if kind not in GGUF_FAMILIES:
        raise ModelError(asked, found, f"tensor names are known for {', '.join(GGUF_FAMILIES)}", instead)


def hf_name(name: str) -> str | None:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'; None for a name of another kind."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{GGUF_TOP[stem]}.{kind}" if stem in GGUF_TOP else None
    _, block, role = stem.split(".", 2)
    return f"model.layers.{block}.{GGUF_BLOCK[role]}.{kind}" if role in GGUF_BLOCK else None


def gguf_name(name: str) -> str | None:
    """The inverse of `hf_name`."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_TOP_BACK[stem]}.{kind}" if stem in _TOP_BACK else None
    block, _, role = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{block}.{_BLOCK_BACK[role]}.{kind}" if role in _BLOCK_BACK else None


def rotary_heads(name: str, config: Any) -> int | None:
    """Heads whose rows are interleaved in the HF tensor `name`; None where nothing is."""
    part = name.rpartition(".")[0]
    if config.model_type not in INTERLEAVED or not part.endswith(("q_proj", "k_proj")):
        return None
    return int(config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads)


def halves(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each rotary head (x0, x32, x1, x33, …); HF keeps them apart."""
    rows, width = weight.shape[0], weight.shape[1:]
    return weight.view(heads, rows // heads // 2, 2, *width).transpose(1, 2).reshape(rows, *width)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `halves`: HF rows in llama.cpp's order."""
    rows, width = weight.shape[0], weight.shape[1:]
    return weight.view(heads, 2, rows // heads // 2, *width).transpose(1, 2).reshape(rows, *width)


class GgufTensors:
    """The tensors of a GGUF file by HF name, decoded to float32 some rows at a time.

    The header is walked by `recipe.gguf_header` and the bytes are read, not mapped: the package's own reader builds an
    object for each of the tokenizer's strings, and mapped pages count as resident.

    Args:
        path: the file.
        config: the model's HF config object: its type, heads and key/value heads.

    Raises:
        ModelError: the package gguf is missing, the family is unknown, or a tensor has no known part in it.
    """

    def __init__(self, path: Path, config: Any) -> None:
        self.path, self.config = path, config
        try:
            import gguf
        except ImportError as error:
            raise ModelError(
                f"weights from {path.name}",
                "the package 'gguf' is not installed",
                instead="pip install 'skimp[gguf]'",
            ) from error
        kind = config.model_type
        check_gguf_family(
            kind, f"GGUF weights for a model of type '{kind}'", str(path), "use the safetensors form of this model"
        )
        self._gguf = gguf
        self._header = read_header(path)
        self._written: dict[str, str] = {}
        self._specs: dict[str, Spec] = {}
        for written, shape in self._header.shapes.items():
            name = hf_name(written)
            if name is not None:
                self._written[name] = written
                self._specs[name] = Spec(torch.float32, shape)
            elif not written.startswith("rope"):  # precomputed rotary factors; ours come from the config
                raise ModelError(f"a tensor of a {kind} model in {path.name}", f"'{written}'")

    def specs(self) -> dict[str, Spec]:
        """What `read` gives, by HF name, in file order."""
        return self._specs

    def read(self, name: str) -> Tensor:
        """One tensor, float32, in HF's layout."""
        spec = self._specs[name]
        value = torch.empty(spec.shape, dtype=spec.dtype)
        self.read_into(name, value)
        return value

    def read_into(self, name: str, target: Tensor) -> None:
        """Decode into `target` (any float dtype): no second copy of a tensor ever exists."""
        for start, piece in self.pieces(name):
            target[start : start + len(piece)].copy_(piece)

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, some rows in float32 and HF's layout), in order.

        Raises:
            ModelError: the file ends inside the tensor.
        """
        import numpy as np

        written, shape = self._written[name], self._specs[name].shape
        kind = self._gguf.GGMLQuantizationType(self._header.types[written])
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        heads = rotary_heads(name, self.config)
        rows, width = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0])
        if len(shape) == 1 and heads is not None:
            rows, width = shape[0], 1
        # Whole rotary heads, so that each piece can be put in order by itself.
        unit = 1 if heads is None else rows // heads
        step = max(1, DECODED // (width * unit)) * unit
        line = width * size // block
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._header.offsets[written])
            for start in range(0, rows, step):
                count = min(step, rows - start)
                raw = np.empty(count * line, np.uint8)
                if file.readinto(raw.data) != raw.nbytes:
                    raise ModelError(f"tensor '{written}' of {self.path}", "the file ends inside it", "it is cut off")
                decoded = self._gguf.dequantize(raw.reshape(count, line) if block > 1 else raw, kind)
                piece = torch.from_numpy(np.ascontiguousarray(decoded, np.float32)).reshape(count, width)
                piece = piece if heads is None else halves(piece, count // unit)
                yield start, piece.reshape(count, *shape[1:]) if len(shape) > 1 else piece.reshape(-1)

    def check(self) -> None:
        """Nothing to hold against each other."""

    def close(self) -> None:
        """Nothing is kept open."""
