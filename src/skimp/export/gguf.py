"""One GGUF file: what llama.cpp and everything built on it loads.

Tensors are read, put into llama.cpp's order, encoded and written one at a time; then the file is read back, and every
tensor is held against what it was made from. Metadata by the GGUF specification's "standardized key-value pairs"
(github.com/ggml-org/ggml, docs/gguf.md); tokens by `export.gguf_tokenizer`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import ModelError, did_you_mean
from skimp.core.read import read
from skimp.core.units import format_bytes
from skimp.export.gguf_tokenizer import tokenizer_fields
from skimp.export.merged import check_tokenizer
from skimp.export.rotary import rotary_facts
from skimp.export.target import MARK_KEY, aside, check_target, mark_of
from skimp.export.tensors import Layout, check_range, lay_out
from skimp.recipe.gguf_header import read_header
from skimp.run.found import Found
from skimp.run.gguf_tensors import GgufTensors, check_gguf_family, gguf_name, interleaved, rotary_heads
from skimp.run.words import Words

#: --dtype -> (GGML type, llama.cpp's file type).
ENCODINGS = {"fp32": ("F32", 0), "fp16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}
BLOCK = 32  # numbers that share one scale in Q8_0: 34 bytes for 32, 8.5 bits each
ARCHITECTURE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its HF name, GGML type, shape in PyTorch's order, bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int


def export_gguf(
    found: Found,
    target: Path,
    *,
    dtype: str | None = None,
    pre: str | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the model as a GGUF file and read it back.

    Args:
        found: a model of a Llama-shaped family.
        target: the .gguf file; new, or an earlier export with `force`.
        dtype: "fp32", "fp16", "bf16" or "q8_0" for the matrices; None keeps 32 or bfloat16 as trained. Norms and
            biases stay float32, as llama.cpp wants them.
        pre: llama.cpp's name for how the tokenizer splits text, where skimp does not know the rule.
        progress: called with (tensors done, tensors): written, then read back.

    Returns:
        {"target", "kind", "bytes", "files", "tensors", "dtype", "largest_error"}.

    Raises:
        ModelError: another architecture, a tokenizer or rotary rule llama.cpp has no name for, a weight outside half
            precision, or a tensor that does not read back as it was.
        CheckpointError: the target is taken, or its disk is full.
    """
    if target.suffix != ".gguf":
        raise ModelError(f"a GGUF file at {target}", f"a name ending in '{target.suffix}'", instead=f"{target}.gguf")
    kind = str(found.config["model_type"])
    check_gguf_family(kind, "--to gguf", f"a model of type '{kind}'", "--to merged: a folder for transformers")
    if found.recipe is not None and found.recipe.attention is not None:
        raise ModelError(
            "--to gguf",
            f"a model trained with attention: {found.recipe.attention.name}",
            "llama.cpp would attend to everything, which it was not trained for",
            "--to merged: its card says what to mind",
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("--to gguf", "the package 'gguf' is not installed", instead="pip install 'skimp[gguf]'")
    if dtype is not None and dtype not in ENCODINGS:
        raise ModelError(f"--dtype {dtype}", "unknown", instead=did_you_mean(dtype, ENCODINGS))
    check_target(target, force, is_our_file)
    layout = lay_out(found, None if dtype in (None, "q8_0") else dtype)
    encoding = dtype or {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(layout.dtype, "fp32")
    layout = lay_out(found, "fp32")  # encoded from the full value, once
    words = Words(found.tokenizer, found.config)
    if found.tokenizer.suffix != ".gguf":  # that of a GGUF is copied, not the converted one
        check_tokenizer(found, words)
    config: Any = layout.skeleton.config
    fields, factors = rotary_facts(config, ARCHITECTURE[kind])
    fields |= model_fields(config, layout, ENCODINGS[encoding][1], target.stem)
    fields |= tokenizer_fields(found.tokenizer, words, int(config.vocab_size), pre)
    entries = [_entry(name, t.spec.shape, encoding) for name, t in layout.tensors.items()]
    total, done = 2 * len(entries), 0

    def told() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    size = sum(e.nbytes for e in entries)
    facts = {"kind": "gguf", "from": found.asked, "step": found.step, "dtype": encoding}
    with aside(target, size + (64 << 20)) as file:
        writer = _Writer(file, ARCHITECTURE[kind], {**fields, MARK_KEY: json.dumps(mark_of(facts))})
        writer.write(entries, factors, lambda entry: encode(entry, layout, config), told)
        found.stored.check()
        worst = read_back(file, entries, layout, config, told)
    return {
        "target": str(target),
        "kind": "gguf",
        "bytes": target.stat().st_size,
        "files": [target.name],
        "tensors": len(entries),
        "dtype": encoding,
        "largest_error": worst,
    }


def is_our_file(target: Path) -> bool:
    """Whether a GGUF carries skimp's mark."""
    if not target.is_file():
        return False
    try:
        return MARK_KEY in read_header(target).fields
    except ModelError:
        return False


def model_fields(config: Any, layout: Layout, file_type: int, name: str) -> dict[str, Any]:
    """Sizes and names; integers are written as uint32, floats as float32.

    Raises:
        ModelError: an activation llama.cpp does not use for this family.
    """
    arch = ARCHITECTURE[config.model_type]
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError("--to gguf", f"activation '{config.hidden_act}'", "llama.cpp computes SiLU for this family")
    window = getattr(config, "sliding_window", None)
    # llama.cpp has no window for these families: within it both compute the same.
    length = min(config.max_position_embeddings, window or config.max_position_embeddings)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    numbers = sum(t.spec.nbytes for t in layout.tensors.values()) // 4
    return {
        "general.type": "model",
        "general.name": name,
        "general.size_label": f"{numbers / 1e6:.0f}M" if numbers < 1e9 else f"{numbers / 1e9:.1f}B",
        "general.file_type": file_type,
        "general.quantization_version": 2,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": length,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.value_length": head,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.dimension_count": head,
        f"{arch}.vocab_size": config.vocab_size,
    }


def _entry(name: str, shape: tuple[int, ...], encoding: str) -> Entry:
    if gguf_name(name) is None:
        raise ModelError("--to gguf", f"a tensor '{name}'", "llama.cpp has no name for it", "--to merged")
    numbers = 1
    for extent in shape:
        numbers *= extent
    if len(shape) < 2:
        return Entry(name, "F32", shape, 4 * numbers)
    if encoding == "q8_0" and shape[-1] % BLOCK:
        encoding = "fp16"  # a row that is no whole number of blocks
    kind = ENCODINGS[encoding][0]
    nbytes = numbers // BLOCK * 34 if kind == "Q8_0" else numbers * (4 if kind == "F32" else 2)
    return Entry(name, kind, shape, nbytes)


def encode(entry: Entry, layout: Layout, config: Any) -> Any:
    """The tensor as a numpy array of the bytes or numbers the file holds."""
    value: Any = layout.tensors[entry.name].make()
    heads = rotary_heads(entry.name, config)
    if heads is not None:
        value = interleaved(value, heads)
    if entry.kind == "F32":
        return value.contiguous().numpy()
    if entry.kind == "F16":
        half = value.half()
        check_range(entry.name, value, half)
        return half.contiguous().numpy()
    if entry.kind == "BF16":
        return value.bfloat16().contiguous().view(torch.uint8).numpy()
    import gguf
    import numpy as np

    rows = max(1, (1 << 20) // value.shape[-1])
    pieces = [gguf.quantize(p.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0) for p in value.split(rows)]
    return np.concatenate(pieces)


class _Writer:
    """The package's writer, fed field by field and tensor by tensor."""

    def __init__(self, file: Path, arch: str, fields: dict[str, Any]) -> None:
        import gguf

        self._gguf = gguf
        self._writer = gguf.GGUFWriter(file, arch)
        for key, value in fields.items():
            self._field(key, value)

    def _field(self, key: str, value: Any) -> None:
        writer: Any = self._writer
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)

    def write(
        self, entries: list[Entry], factors: Tensor | None, make: Callable[[Entry], Any], told: Callable[[], None]
    ) -> None:
        """Header, then the tensors; what was opened is closed whatever happens."""
        import numpy as np

        writer: Any = self._writer
        kinds = self._gguf.GGMLQuantizationType
        try:
            if factors is not None:
                writer.add_tensor_info("rope_freqs.weight", factors.shape, np.dtype(np.float32), 4 * factors.numel())
            for e in entries:
                writer.add_tensor_info(
                    gguf_name(e.name), e.shape, np.dtype(np.float32), e.nbytes, raw_dtype=kinds[e.kind]
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors is not None:
                writer.write_tensor_data(factors.numpy())
            for e in entries:
                writer.write_tensor_data(make(e))
                told()
            writer.flush()
        finally:
            writer.close()


def read_back(file: Path, entries: list[Entry], layout: Layout, config: Any, told: Callable[[], None]) -> float:
    """Hold every tensor of the file against its source; returns the largest absolute difference.

    Raises:
        ModelError: a tensor differs by more than its encoding rounds.
    """
    stored = GgufTensors(file, config)
    worst = 0.0
    for entry in entries:
        value, wrong = layout.tensors[entry.name].make(), 0
        for start, found in stored.pieces(entry.name):
            part = value[start : start + len(found)]
            wrong += differing(entry.kind, part, found)
            worst = max(worst, read((found - part).abs().max(), expect=0.0))
        if wrong:
            raise ModelError(
                f"{entry.name} read back from the file",
                f"{wrong:,} of {value.numel():,} numbers differ from the model's by more than {entry.kind} rounds",
                f"{format_bytes(entry.nbytes)} were written wrongly, or the disk is failing",
                "export again; if it happens again, report it",
            )
        told()
    return worst


def differing(kind: str, value: Tensor, found: Tensor) -> int:
    """How many numbers are not what encoding `value` as `kind` and decoding it gives."""
    if kind == "Q8_0":
        # A block's largest number is 127 steps. Rounding is half a step; the step itself is a half-precision number.
        step = value.reshape(-1, BLOCK).abs().amax(1, keepdim=True) / 127
        excess = (found.reshape(-1, BLOCK) - value.reshape(-1, BLOCK)).abs() - step * (0.5 + 127 * 2.0**-11)
        return int(read((excess > 2.0**-24).sum(), expect=0.0))
    cast = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    return int(read((found != value.to(cast).float()).sum(), expect=0.0))
