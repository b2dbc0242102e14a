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
    "long": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], **_BLOCKS, "num_hidden_layers": 3,
        "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 16000, "tie_word_embeddings": False,
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
#: Optimizer steps of a run: the second holds what the first left behind.
STEPS = 2
DEFAULTS: dict[str, Any] = {
    "rows": 2, "rule": "adamw", "precision": "fp32", "exact": {"recompute": "none"}, "adapter": None, "threads": 1,
    "whole": False, "clip": 1.0,
}  # fmt: skip


def _case(model: str, seq: int, **changes: Any) -> dict[str, Any]:
    if unknown := set(changes) - set(DEFAULTS):
        raise ValueError(f"a case's {', '.join(unknown)}")
    return {"model": model, "seq": seq, **DEFAULTS, **changes}


ALL: dict[str, Any] = {"recompute": "all"}
#: Names say what a case is there for; `whole` evaluates, samples and saves too.
CASES: dict[str, dict[str, Any]] = {
    # SmolLM2 with its real weights, all 30 blocks
    "smollm2-64": _case("smollm2", 64, rows=4),
    "smollm2-64-8bit": _case("smollm2", 64, rows=4, rule="adamw8bit"),
    "smollm2-128-some": _case("smollm2", 128, rows=4, exact={"recompute": 10}),
    "smollm2-128-in-backward": _case("smollm2", 128, rows=4, exact={**ALL, "in_backward": True}),
    "smollm2-128-8bit-in-backward": _case("smollm2", 128, rows=4, rule="adamw8bit", exact={**ALL, "in_backward": True}),
    "smollm2-256-accumulate": _case("smollm2", 256, rows=4, exact={**ALL, "micro_batch": 1}),
    "smollm2-256-lora": _case("smollm2", 256, rows=4, adapter="lora"),
    "smollm2-512-lora-recompute": _case("smollm2", 512, adapter="lora", exact=ALL),
    "smollm2-512-half": _case("smollm2", 512, exact={"recompute": 15}),
    "smollm2-512-8bit-chunk": _case("smollm2", 512, rows=1, rule="adamw8bit", exact={**ALL, "loss_chunk": 64}),
    "smollm2-1024-all": _case("smollm2", 1024, rows=1, exact=ALL),
    "smollm2-64-whole": _case("smollm2", 64, rows=4, whole=True),
    "smollm2-128-return": _case("smollm2", 128, rows=4, exact={"recompute": 20, "malloc": "return"}),
    "smollm2-128-two-threads": _case("smollm2", 128, rows=4, threads=2),
    # its shapes with six blocks or two, from scratch
    "smollm2-6-64": _case("smollm2-6", 64, rows=4),
    "smollm2-6-128-plain-kernels": _case("smollm2-6", 128, rows=4, exact={"recompute": "none", "kernels": "plain"}),
    "smollm2-6-512-some": _case("smollm2-6", 512, rows=4, exact={"recompute": [0, 2, 5]}),
    "smollm2-6-1024": _case("smollm2-6", 1024),
    "smollm2-6-2048": _case("smollm2-6", 2048, rows=1),
    "smollm2-2-4096-all": _case("smollm2-2", 4096, rows=1, exact=ALL),
    "smollm2-2-256-bf16": _case("smollm2-2", 256, precision="bf16"),
    "smollm2-2-256-mixed": _case("smollm2-2", 256, precision="bf16-mixed"),
    "smollm2-2-512-chunk-128": _case("smollm2-2", 512, rows=1, exact={"recompute": "none", "loss_chunk": 128}),
    "smollm2-2-512-chunk-512": _case("smollm2-2", 512, rows=1, exact={"recompute": "none", "loss_chunk": 512}),
    "smollm2-6-1024-lora": _case("smollm2-6", 1024, rows=1, adapter="lora"),
    # long rows of a narrow Llama: what it holds is activations
    "long-2048-some": _case("long", 2048, rows=4, exact={"recompute": 1}),
    "long-4096": _case("long", 4096, rows=1),
    "long-4096-accumulate": _case("long", 4096, rows=2, exact={"recompute": "none", "micro_batch": 1}),
    "long-4096-lora": _case("long", 4096, rows=1, adapter="lora"),
    "long-8192": _case("long", 8192, rows=1),
    "long-8192-chunk": _case("long", 8192, rows=1, exact={"recompute": 1, "loss_chunk": 256}),
    "long-8192-8bit-in-backward": _case(
        "long", 8192, rows=1, rule="adamw8bit", exact={"recompute": "none", "in_backward": True}
    ),
    # Llama, untied
    "llama-64": _case("llama", 64, rows=8),
    "llama-128": _case("llama", 128),
    "llama-256-accumulate": _case("llama", 256, exact={"recompute": "none", "micro_batch": 1}),
    "llama-512-in-backward": _case("llama", 512, rows=1, exact={"recompute": 2, "in_backward": True}),
    "llama-512-no-clip": _case("llama", 512, rows=1, clip=None, exact={"recompute": "none", "in_backward": True}),
    "llama-1024-8bit": _case("llama", 1024, rows=1, rule="adamw8bit", exact=ALL),
    "llama-1024-lora": _case("llama", 1024, adapter="lora"),
    "llama-256-bf16-8bit": _case("llama", 256, precision="bf16", rule="adamw8bit"),
    "llama-256-return": _case("llama", 256, exact={"recompute": "none", "malloc": "return"}),
    "llama-256-whole": _case("llama", 256, whole=True),
    "llama-256-two-threads": _case("llama", 256, threads=2),
    # GPT-2: fused query, key and value; learned positions
    "gpt2-64": _case("gpt2", 64, rows=4),
    "gpt2-128": _case("gpt2", 128),
    "gpt2-256-all": _case("gpt2", 256, exact=ALL),
    "gpt2-512-8bit": _case("gpt2", 512, rows=1, rule="adamw8bit"),
    "gpt2-1024": _case("gpt2", 1024, rows=1, exact={"recompute": 1}),
    "gpt2-256-in-backward": _case("gpt2", 256, rows=1, exact={"recompute": "none", "in_backward": True}),
    "gpt2-1024-lora": _case("gpt2", 1024, rows=1, adapter="lora"),
    "gpt2-128-mixed": _case("gpt2", 128, precision="bf16-mixed"),
    "gpt2-128-return": _case("gpt2", 128, exact={**ALL, "malloc": "return"}),
    # Qwen: biases (2), normed queries and keys (3), large vocabularies
    "qwen2-128": _case("qwen2", 128),
    "qwen2-256-8bit": _case("qwen2", 256, rule="adamw8bit"),
    "qwen2-512-chunk": _case("qwen2", 512, rows=1, exact={"recompute": 2, "loss_chunk": 256}),
    "qwen2-512-in-backward": _case("qwen2", 512, rows=1, rule="adamw8bit", exact={**ALL, "in_backward": True}),
    "qwen2-128-accumulate": _case("qwen2", 128, rows=6, exact={"recompute": "none", "micro_batch": 2}),
    "qwen3-64": _case("qwen3", 64, rows=4),
    "qwen3-256": _case("qwen3", 256, exact={"recompute": [1, 3]}),
    "qwen3-1024-lora-all": _case("qwen3", 1024, adapter="lora", exact=ALL),
    "qwen3-256-bf16": _case("qwen3", 256, rows=1, precision="bf16"),
    "qwen3-128-two-threads": _case("qwen3", 128, threads=2, exact=ALL),
    # Gemma and Mistral: a very large vocabulary; a window
    "gemma-64": _case("gemma", 64, rows=4),
    "gemma-128-8bit": _case("gemma", 128, rule="adamw8bit"),
    "gemma-256-all": _case("gemma", 256, exact=ALL),
    "gemma-512-in-backward": _case("gemma", 512, rows=1, exact={"recompute": "none", "in_backward": True}),
    "gemma-1024-lora": _case("gemma", 1024, rows=1, adapter="lora"),
    "mistral-128": _case("mistral", 128),
    "mistral-512-some": _case("mistral", 512, rows=1, exact={"recompute": 2}),
    "mistral-256-8bit": _case("mistral", 256, rule="adamw8bit", exact=ALL),
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
        "train": {"steps": STEPS, "batch_tokens": tokens, "lr": 2e-5, "warmup": 0, "clip": case["clip"]},
        "eval": {"tokens": 1024} if case["whole"] else None, "checkpoint": {"at_end": case["whole"]},
        "report": False, "output": str(work / "runs" / name),
    }  # fmt: skip
    if case["adapter"]:
        found["adapter"] = case["adapter"]
    if case["whole"]:
        found["sample"] = {"prompt": "The with statement", "tokens": 8}
    return found
