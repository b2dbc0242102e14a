"""Weights from disk into a model, tensor by tensor, into storage that is already there.

Peak = the model + one tensor. Files are read, not memory-mapped: mapped pages count as resident, and a map's odd
alignment changes the last bits of matrix-vector products between a fresh and a resumed run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.errors import ModelError

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
Progress = Callable[[int, int], None]


def load_weights(model: nn.Module, source: Path, progress: Progress | None = None) -> None:
    """Fill `model`'s parameters from a folder of safetensors, one such file, or a GGUF file.

    Raises:
        ModelError: a missing, extra or differently shaped tensor, by name; an unsupported file.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in targets.items():
        first.setdefault(id(parameter), name)
    wanted = {name for name, p in targets.items() if first[id(p)] == name}
    filled: set[str] = set()
    reader = _gguf(source, model.config) if source.suffix == ".gguf" else _safetensors(source)
    with torch.no_grad():
        for written, value in reader:
            known = written if written in targets else _with_prefix(written, targets)
            if known is None:
                continue
            target = targets[known]
            if value.shape != target.shape:
                raise ModelError(
                    f"weights of {known} from {source}",
                    f"shape {tuple(value.shape)}",
                    f"the config asks for {tuple(target.shape)}",
                    "use the config that belongs to these weights",
                )
            target.copy_(value)
            filled.add(first[id(target)])
            del value
            if progress is not None:
                progress(len(filled), len(wanted))
    missing = sorted(wanted - filled)
    if missing:
        raise ModelError(
            f"weights for {len(wanted)} tensors from {source}",
            f"{len(missing)} missing: {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}",
            "training would start from uninitialised memory there",
            "use a complete checkpoint, or model.init=scratch",
        )


def _with_prefix(name: str, targets: dict[str, Any]) -> str | None:
    """Base-model files lack the 'model.' or 'transformer.' of the causal LM; add it where that makes a match."""
    return next((f"{p}.{name}" for p in ("model", "transformer") if f"{p}.{name}" in targets), None)


def _safetensors(source: Path) -> Iterator[tuple[str, Tensor]]:
    if source.is_dir():
        index = source / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [source / n for n in names]
        else:
            files = sorted(source.glob("*.safetensors"))
    else:
        files = [source]
    absent = [f for f in files if not f.exists()]
    if not files or absent:
        raise ModelError(
            f"safetensors weights in {source}",
            f"missing {absent[0].name}" if absent else "none",
            "pickled .bin weights are not read: they can run code",
            "save the model with safetensors",
        )
    from skimp.run.safetensors_stream import SafetensorsReader

    for file in files:
        with SafetensorsReader(file) as reader:
            for name in reader.names():
                yield name, reader.read(name)


def _gguf(source: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            f"weights from {source.name}",
            "the package 'gguf' is not installed",
            instead="pip install 'skimp[gguf]'",
        ) from error
    if config.model_type not in GGUF_FAMILIES:
        raise ModelError(
            f"GGUF weights for a model of type '{config.model_type}'",
            str(source),
            f"tensor names are known for {', '.join(GGUF_FAMILIES)}",
            "use the safetensors form of this model",
        )
    for tensor in gguf.GGUFReader(str(source)).tensors:
        stem, _, kind = tensor.name.rpartition(".")
        if stem.startswith("blk."):
            _, block, role = stem.split(".", 2)
            mapped = f"model.layers.{block}.{GGUF_BLOCK[role]}" if role in GGUF_BLOCK else None
        else:
            mapped = GGUF_TOP.get(stem)
        if mapped is None:
            if stem.startswith("rope"):  # llama.cpp's precomputed rotary factors; ours come from the config
                continue
            raise ModelError(f"a tensor of a {config.model_type} model in {source.name}", f"'{tensor.name}'")
        value = _tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        value = value.reshape(tuple(int(n) for n in reversed(tensor.shape.tolist())))
        if config.model_type in ("llama", "mistral") and mapped.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if mapped.endswith("q_proj") else config.num_key_value_heads
            value = _halves(value, heads)
        yield f"{mapped}.{kind}", value


def _tensor(array: Any) -> Tensor:
    """A tensor over a numpy array; one that still maps the file (float32 tensors are not decoded) is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _halves(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp interleaves the two halves of each rotary head (x0, x32, x1, x33, …); HF keeps them apart."""
    rows, width = weight.shape[0], weight.shape[1:]
    return weight.view(heads, rows // heads // 2, 2, *width).transpose(1, 2).reshape(rows, *width)


def init_scratch(model: nn.Module, seed: int) -> None:
    """The architecture's own random initialisation, from `seed`, without touching the global generator."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        initialise: Any = model._init_weights
        tie: Any = model.tie_weights
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
            bias = getattr(module, "bias", None)
            if isinstance(bias, nn.Parameter):
                bias.zero_()
        for module in model.modules():
            initialise(module)
        tie()
