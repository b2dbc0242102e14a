"""The configurations of `accuracy.py`: models of five styles, each wide enough to stand 300 MB above the process.

A case is a model and what differs from `DEFAULTS`. Every value the plan looks at is met by several cases, and no two
cases are alike in all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_BLOCKS = {"num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 8192}
#: content of config.json; "smollm2" is the real one, with its weights.
MODELS: dict[str, dict[str, Any] | None] = {
    "smollm2": None,
    "smollm2-6": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **_BLOCKS, "num_hidden_layers": 6,
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "smollm2-2": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **_BLOCKS, "num_hidden_layers": 2,
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **_BLOCKS, "hidden_size": 512,
        "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 3, "n_head": 12,
        "vocab_size": 50257, "n_positions": 8192, "bos_token_id": 0, "eos_token_id": 0,
    },
    "qwen2": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **_BLOCKS, "hidden_size": 512,
        "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 60000,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_BLOCKS, "hidden_size": 512,
        "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 96,
        "vocab_size": 40000, "tie_word_embeddings": False,
    },
    "gemma": {
        "model_type": "gemma", "architectures": ["GemmaForCausalLM"], **_BLOCKS, "num_hidden_layers": 3,
        "hidden_size": 384, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 128, "vocab_size": 120000, "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], **_BLOCKS, "hidden_size": 640,
        "intermediate_size": 1792, "num_attention_heads": 10, "num_key_value_heads": 2, "vocab_size": 32000,
        "sliding_window": 384, "tie_word_embeddings": False,
    },
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "rows": 4, "rule": "adamw", "precision": "fp32", "exact": {"recompute": "none"}, "adapter": None, "threads": 1,
    "whole": False, "clip": 1.0, "steps": 3,
}  # fmt: skip


def _case(model: str, seq: int, **changes: Any) -> dict[str, Any]:
    if unknown := set(changes) - set(DEFAULTS):
        raise ValueError(f"a case's {', '.join(unknown)}")
    return {"model": model, "seq": seq, **DEFAULTS, **changes}


ALL: dict[str, Any] = {"recompute": "all"}
#: Names say what a case is there for; `whole` evaluates, samples and saves too.
CASES: dict[str, dict[str, Any]] = {
    # SmolLM2 with its real weights, all 30 blocks
    "smollm2-64": _case("smollm2", 64),
    "smollm2-64-8bit": _case("smollm2", 64, rule="adamw8bit"),
    "smollm2-128-some": _case("smollm2", 128, exact={"recompute": 10}),
    "smollm2-128-in-backward": _case("smollm2", 128, exact={**ALL, "in_backward": True}),
    "smollm2-128-8bit-in-backward": _case("smollm2", 128, rule="adamw8bit", exact={**ALL, "in_backward": True}),
    "smollm2-256-accumulate": _case("smollm2", 256, exact={**ALL, "micro_batch": 1}),
    "smollm2-256-lora": _case("smollm2", 256, adapter="lora"),
    "smollm2-512-lora-recompute": _case("smollm2", 512, rows=2, adapter="lora", exact=ALL),
    "smollm2-512-half": _case("smollm2", 512, rows=2, exact={"recompute": 15}),
    "smollm2-512-8bit-chunk": _case("smollm2", 512, rows=1, rule="adamw8bit", exact={**ALL, "loss_chunk": 64}),
    "smollm2-1024-all": _case("smollm2", 1024, rows=1, exact=ALL),
    "smollm2-64-whole": _case("smollm2", 64, whole=True),
    "smollm2-128-return": _case("smollm2", 128, exact={"recompute": 20, "malloc": "return"}),
    "smollm2-128-two-threads": _case("smollm2", 128, threads=2),
    # its shapes with six blocks, from scratch
    "smollm2-6-64": _case("smollm2-6", 64),
    "smollm2-6-128-plain-kernels": _case("smollm2-6", 128, exact={"recompute": "none", "kernels": "plain"}),
    "smollm2-6-512-some": _case("smollm2-6", 512, exact={"recompute": [0, 2, 5]}),
    "smollm2-6-1024": _case("smollm2-6", 1024, rows=2),
    "smollm2-6-2048": _case("smollm2-6", 2048, rows=1),
    "smollm2-2-4096-all": _case("smollm2-2", 4096, rows=1, steps=2, exact=ALL),
    "smollm2-2-8192-some": _case("smollm2-2", 8192, rows=1, steps=2, exact={"recompute": 1}),
    "smollm2-6-2048-8bit": _case("smollm2-6", 2048, rows=1, rule="adamw8bit"),
    "smollm2-6-512-bf16": _case("smollm2-6", 512, precision="bf16"),
    "smollm2-6-512-mixed": _case("smollm2-6", 512, precision="bf16-mixed"),
    "smollm2-6-1024-chunk-256": _case("smollm2-6", 1024, rows=1, exact={"recompute": "none", "loss_chunk": 256}),
    "smollm2-6-1024-chunk-1024": _case("smollm2-6", 1024, rows=1, exact={"recompute": "none", "loss_chunk": 1024}),
    "smollm2-6-2048-lora": _case("smollm2-6", 2048, rows=1, adapter="lora"),
    # Llama, untied
    "llama-64": _case("llama", 64, rows=8),
    "llama-256": _case("llama", 256),
    "llama-512-accumulate": _case("llama", 512, exact={"recompute": "none", "micro_batch": 1}),
    "llama-1024-in-backward": _case("llama", 1024, rows=2, exact={"recompute": 2, "in_backward": True}),
    "llama-2048-no-clip": _case("llama", 2048, rows=1, clip=None, exact={"recompute": "none", "in_backward": True}),
    "llama-4096-8bit": _case("llama", 4096, rows=1, steps=2, rule="adamw8bit", exact=ALL),
    "smollm2-2-8192-chunk": _case("smollm2-2", 8192, rows=1, steps=2, exact={**ALL, "loss_chunk": 128}),
    "llama-1024-lora": _case("llama", 1024, rows=2, adapter="lora"),
    "llama-512-bf16-8bit": _case("llama", 512, precision="bf16", rule="adamw8bit"),
    "llama-256-return": _case("llama", 256, exact={"recompute": "none", "malloc": "return"}),
    "llama-512-whole": _case("llama", 512, whole=True),
    "llama-512-two-threads": _case("llama", 512, threads=2),
    # GPT-2: fused query, key and value; learned positions
    "gpt2-64": _case("gpt2", 64),
    "gpt2-256": _case("gpt2", 256),
    "gpt2-512-all": _case("gpt2", 512, exact=ALL),
    "gpt2-1024-8bit": _case("gpt2", 1024, rows=1, rule="adamw8bit"),
    "gpt2-2048": _case("gpt2", 2048, rows=1, exact={"recompute": 1}),
    "gpt2-4096-all": _case("gpt2", 4096, rows=1, steps=2, exact=ALL),
    "gpt2-512-in-backward": _case("gpt2", 512, rows=2, exact={"recompute": "none", "in_backward": True}),
    "gpt2-1024-lora": _case("gpt2", 1024, rows=1, adapter="lora"),
    "gpt2-256-mixed": _case("gpt2", 256, precision="bf16-mixed"),
    "gpt2-256-return": _case("gpt2", 256, exact={**ALL, "malloc": "return"}),
    # Qwen: biases (2), normed queries and keys (3), large vocabularies
    "qwen2-128": _case("qwen2", 128),
    "qwen2-512-8bit": _case("qwen2", 512, rule="adamw8bit"),
    "qwen2-1024-chunk": _case("qwen2", 1024, rows=2, exact={"recompute": 2, "loss_chunk": 512}),
    "qwen2-2048-in-backward": _case("qwen2", 2048, rows=1, rule="adamw8bit", exact={**ALL, "in_backward": True}),
    "qwen2-512-accumulate": _case("qwen2", 512, rows=6, exact={"recompute": "none", "micro_batch": 2}),
    "qwen3-64": _case("qwen3", 64),
    "qwen3-512": _case("qwen3", 512, exact={"recompute": [1, 3]}),
    "qwen3-1024-lora-all": _case("qwen3", 1024, rows=4, adapter="lora", exact=ALL),
    "qwen3-2048-bf16": _case("qwen3", 2048, rows=1, precision="bf16"),
    "qwen3-4096": _case("qwen3", 4096, rows=1, steps=2, exact={"recompute": 3}),
    "qwen3-256-two-threads": _case("qwen3", 256, threads=2, exact=ALL),
    # Gemma and Mistral: a very large vocabulary; a window
    "gemma-64": _case("gemma", 64),
    "gemma-256-8bit": _case("gemma", 256, rule="adamw8bit"),
    "gemma-512-all": _case("gemma", 512, exact=ALL),
    "gemma-2048": _case("gemma", 2048, rows=1),
    "gemma-1024-in-backward": _case("gemma", 1024, rows=1, exact={"recompute": "none", "in_backward": True}),
    "gemma-1024-lora": _case("gemma", 1024, rows=2, adapter="lora"),
    "mistral-256": _case("mistral", 256),
    "mistral-1024-some": _case("mistral", 1024, rows=2, exact={"recompute": 2}),
    "mistral-512-8bit": _case("mistral", 512, rule="adamw8bit", exact=ALL),
    "mistral-2048-lora": _case("mistral", 2048, rows=1, adapter="lora"),
}


def recipe(name: str, work: Path) -> dict[str, Any]:
    """A case as a recipe; model folders are in `work`."""
    case = CASES[name]
    model: Any = "smollm2-135m"
    if case["model"] != "smollm2":
        model = {"name": str(work / "models" / case["model"]), "init": "scratch"}
    tokens = case["rows"] * case["seq"]
    exact = {"micro_batch": case["rows"], **case["exact"]}
    if exact.get("malloc") is None:
        exact.pop("malloc", None)
    found = {
        "model": model, "precision": case["precision"], "optimizer": case["rule"], "exact": exact,
        "data": {"train": "pydoc", "validation": 0.05 if case["whole"] else None, "seq_len": case["seq"]},
        "train": {"steps": case["steps"], "batch_tokens": tokens, "lr": 2e-5, "warmup": 0, "clip": case["clip"]},
        "eval": {"tokens": 1024} if case["whole"] else None, "checkpoint": {"at_end": case["whole"]},
        "report": False, "output": str(work / "runs" / name),
    }  # fmt: skip
    if case["adapter"]:
        found["adapter"] = case["adapter"]
    if case["whole"]:
        found["sample"] = {"prompt": "The with statement", "tokens": 8}
    return found
