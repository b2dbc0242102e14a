"""A Hugging Face folder: what `AutoModelForCausalLM.from_pretrained` and everything built on it loads.

Tensors go from the checkpoint to the file one at a time: the process never holds the model, only its largest tensor
(113 MB of float32 for the embedding of the 135M model).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skimp.export.card import model_card
from skimp.export.target import MARK, aside, check_target, is_our_folder, mark_of
from skimp.export.tensors import Layout, lay_out
from skimp.run import safetensors_stream
from skimp.run.durable import write_file, write_json
from skimp.run.found import Found
from skimp.run.tensor_bytes import Later
from skimp.run.words import Words, tokenizer_folder

#: Everything a tokenizer may be made of; copied as it is.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
#: A shard at most, as transformers has it.
SHARD = 5 * 10**9
WEIGHTS = "model.safetensors"


def export_merged(
    found: Found,
    target: Path,
    *,
    dtype: str | None = None,
    shard: int = SHARD,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the model as a folder that transformers loads.

    Args:
        found: any model skimp opens.
        target: the folder; new, empty, or an earlier export with `force`.
        dtype: "fp32", "bf16", "fp16"; None as the weights were computed.
        shard: most bytes in one safetensors file.
        progress: called with (tensors written, tensors).

    Returns:
        {"target", "kind", "bytes", "files", "tensors", "dtype"}.

    Raises:
        CheckpointError: the target is taken, or its disk is full.
        ModelError: a tensor that is missing or does not fit the dtype; a tokenizer that does not fit the model.
    """
    check_target(target, force, is_our_folder)
    layout = lay_out(found, dtype)
    words = Words(found.tokenizer, found.config)
    check_tokenizer(found, words)
    shards = cut(layout, shard)
    with aside(target, layout.nbytes + (64 << 20)) as folder:
        folder.mkdir()
        write_weights(folder, shards, progress)
        found.stored.check()
        write_json(folder / "config.json", hf_config(found, layout))
        write_json(folder / "generation_config.json", generation_config(found, words))
        copy_tokenizer(tokenizer_folder(found.tokenizer), folder)
        write_file(folder / "README.md", model_card(found, layout, target).encode())
        facts = {"kind": "merged", "from": found.asked, "step": found.step, "dtype": _name(layout)}
        write_json(folder / MARK, mark_of(facts))
    files = sorted(target.glob("*.safetensors"))
    return {
        "target": str(target),
        "kind": "merged",
        "bytes": sum(f.stat().st_size for f in files),
        "files": [f.name for f in files],
        "tensors": len(layout.tensors),
        "dtype": _name(layout),
    }


def _name(layout: Layout) -> str:
    return str(layout.dtype).removeprefix("torch.")


def check_tokenizer(found: Found, words: Words) -> None:
    """A tokenizer with more tokens than the embedding has rows would crash, or read foreign memory, at its first use.

    Raises:
        ModelError: with both sizes.
    """
    from skimp.data.vocabulary import check_vocabulary

    check_vocabulary(words.tokenizer.size - 1, words.tokenizer.size, found.config["vocab_size"], "the tokenizer")


def cut(layout: Layout, limit: int) -> list[dict[str, Later]]:
    """Tensors in model order, as many to a file as stay within `limit` bytes; a larger one has a file of its own."""
    shards: list[dict[str, Later]] = [{}]
    size = 0
    for name, tensor in layout.tensors.items():
        if shards[-1] and size + tensor.spec.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.spec.nbytes
    return shards


def write_weights(
    folder: Path, shards: list[dict[str, Later]], progress: Callable[[int, int], None] | None = None
) -> None:
    """model.safetensors, or numbered shards and the index that says what is where."""
    total, done = sum(map(len, shards)), 0
    index: dict[str, str] = {}

    def told(tensor: Later) -> Later:
        def make() -> Any:
            nonlocal done
            value = tensor.make()
            done += 1
            if progress is not None:
                progress(done, total)
            return value

        return Later(tensor.spec, make)

    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        safetensors_stream.write(folder / name, {n: told(t) for n, t in shard.items()})
        index |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        size = sum(t.spec.nbytes for shard in shards for t in shard.values())
        write_json(folder / f"{WEIGHTS}.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def hf_config(found: Found, layout: Layout) -> dict[str, Any]:
    """config.json as transformers itself writes it, with the architecture, the dtype and the truth about tying."""
    from transformers import AutoConfig

    skip = ("transformers_version", "architectures", "auto_map", "quantization_config", "torch_dtype", "dtype")
    facts = {k: v for k, v in found.config.items() if k not in skip}
    described = AutoConfig.for_model(facts.pop("model_type"), **facts)
    config = json.loads(described.to_json_string(use_diff=True))
    # The names of transformers 5, and those that loaders before it read: `torch_dtype`, and rotary facts at the top.
    rotary = config.get("rope_parameters")
    if isinstance(rotary, dict) and "rope_theta" in rotary:
        config["rope_theta"] = rotary["rope_theta"]
        if rotary.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rotary.items() if k != "rope_theta"}
    return {
        **config,
        "architectures": [type(layout.skeleton).__name__],
        "tie_word_embeddings": layout.tied,
        "dtype": _name(layout),
        "torch_dtype": _name(layout),
    }


def generation_config(found: Found, words: Words) -> dict[str, Any]:
    """Begin, end and padding tokens; what the source's own file says besides is kept."""
    own = words.folder / "generation_config.json"
    base = json.loads(own.read_text(encoding="utf-8")) if own.is_file() else {}
    ends = sorted(words.ends)
    begin, pad = found.config.get("bos_token_id"), found.config.get("pad_token_id")
    return {
        **base,
        **({"bos_token_id": begin} if begin is not None else {}),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        **({"pad_token_id": pad} if pad is not None else {}),
    }


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Every file the tokenizer is made of; marks of the machine it was converted on are left out."""
    for name in TOKENIZER:
        if not (source / name).is_file():
            continue
        if name == "tokenizer_config.json":
            config = json.loads((source / name).read_text(encoding="utf-8"))
            for local in ("is_local", "local_files_only", "name_or_path"):
                config.pop(local, None)
            # The name of the same class before transformers 5; both know it.
            if config.get("tokenizer_class") == "TokenizersBackend":
                config["tokenizer_class"] = "PreTrainedTokenizerFast"
            write_json(folder / name, config)
        else:
            write_file(folder / name, (source / name).read_bytes())
