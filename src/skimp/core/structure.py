"""Which module plays which role in a model, found from the module graph and kept by fully qualified name.

Names, not objects: sharding and compression replace parameter objects, a name survives. Everything that wraps,
counts or freezes asks here, so no technique carries a table of model classes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from skimp.core.errors import ModelError

#: role -> the leaf names that play it inside a block, across the families skimp knows.
ROLES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "query"),
    "k": ("k_proj", "key"),
    "v": ("v_proj", "value"),
    "qkv": ("c_attn", "qkv_proj", "query_key_value", "Wqkv"),
    "o": ("o_proj", "out_proj", "attention.output.dense"),
    "gate": ("gate_proj",),
    "up": ("up_proj", "fc1", "c_fc", "intermediate.dense", "dense_h_to_4h"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "fc2", "dense_4h_to_h"),
    "c_proj": ("c_proj",),  # GPT-2 names both the attention output and the MLP output so
}

#: Families whose `base model -> head` path is covered by a test; others are verified on real tokens at build.
TESTED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gpt2", "opt")


@dataclass(frozen=True)
class Structure:
    """Roles of a causal language model.

    Attributes:
        family: HF `model_type`.
        base: name of the module that maps ids to final hidden states ("model", "transformer", …).
        blocks: names of the repeated blocks, in order.
        embedding, head: names of the token embedding and of the output projection.
        tied: the head's weight is the embedding's weight.
        hidden, vocab, heads, kv_heads, head_dim, positions: sizes; `positions` is the largest position + 1.
        softcap: Gemma-2 style cap on the logits, None without.
        logit_scale: factor on the logits (Cohere, Granite), 1.0 without.
        roles: block-relative names by role, e.g. {"q": ("self_attn.q_proj",)}.
    """

    family: str
    base: str
    blocks: tuple[str, ...]
    embedding: str
    head: str
    tied: bool
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    softcap: float | None = None
    logit_scale: float = 1.0
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def block_of(self, name: str) -> int | None:
        """The index of the block a parameter or module name lies in, or None."""
        for index, block in enumerate(self.blocks):
            if name == block or name.startswith(block + "."):
                return index
        return None


def read_structure(model: nn.Module) -> Structure:
    """Find the roles of an HF causal language model.

    Raises:
        ModelError: not a causal LM with an embedding, a linear head and a list of equal blocks; names what was found.
    """
    config: Any = getattr(model, "config", None)
    family = str(getattr(config, "model_type", type(model).__name__))
    names = {id(module): name for name, module in model.named_modules()}
    embedding = _call(model, "get_input_embeddings")
    head = _call(model, "get_output_embeddings")
    blocks = _blocks(model)
    base = getattr(model, "base_model", None)
    missing = [
        what
        for what, there in (
            ("a token embedding", isinstance(embedding, nn.Embedding)),
            ("a linear output head", isinstance(head, nn.Linear)),
            ("a list of repeated blocks", bool(blocks)),
            ("a base model under the head", base is not None and base is not model),
        )
        if not there
    ]
    if missing or getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"the structure of a causal language model in '{type(model).__name__}' (model_type '{family}')",
            "no " + ", no ".join(missing) if missing else "an encoder-decoder",
            "skimp trains decoder-only language models",
            "use a causal LM; tested families: " + ", ".join(TESTED_FAMILIES),
        )
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    heads = int(_first(config, "num_attention_heads", "n_head", default=1))
    hidden = embedding.embedding_dim
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Structure(
        family=family,
        base=names[id(base)],
        blocks=tuple(name for name, _ in blocks),
        embedding=names[id(embedding)],
        head=names[id(head)],
        tied=head.weight is embedding.weight,
        hidden=head.in_features,
        vocab=head.out_features,
        heads=heads,
        kv_heads=int(kv_heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        positions=int(_first(config, "max_position_embeddings", "n_positions", default=2**31)),
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=_logit_scale(config),
        roles=_roles(blocks[0][1]),
    )


def input_name(layer: str) -> str:
    """A name for what a linear layer reads: queries, keys and values read one tensor, so do gate and up; what any other
    layer reads is called as the layer is."""
    owner, _, leaf = layer.rpartition(".")
    for shared, roles in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        if any(leaf in ROLES[role] for role in roles):
            return f"{owner}.{shared}"
    return layer


def is_attention_output(layer: str) -> bool:
    """Whether a layer of this name is attention's output projection."""
    owner, _, leaf = layer.rpartition(".")
    return any(_ends(layer, name) for name in ROLES["o"]) or (leaf == "c_proj" and "attn" in owner)


def layers_of(config: dict[str, Any]) -> str:
    """The config key that holds the number of blocks, whatever the family calls it."""
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if key in config:
            return key
    raise ModelError("the number of blocks in the model's config", "keys " + ", ".join(sorted(config)[:20]))


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The longest ModuleList whose members share one class: in a language model, its blocks."""
    best: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(best) and len({type(m) for m in module}) == 1:
            best = [(f"{name}.{i}", m) for i, m in enumerate(module)]
    return best


def _roles(block: nn.Module) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name, module in block.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        role = next((r for r, leaves in ROLES.items() if any(_ends(name, leaf) for leaf in leaves)), None)
        if role is None and getattr(module, "weight", None) is not None and module.weight.dim() == 1:
            role = "norm"
        if role is not None:
            found.setdefault(role, []).append(name)
    return {role: tuple(names) for role, names in found.items()}


def _ends(name: str, leaf: str) -> bool:
    return name == leaf or name.endswith("." + leaf)


def _call(model: nn.Module, method: str) -> Any:
    function = getattr(model, method, None)
    return function() if callable(function) else None


def _first(config: Any, *keys: str, default: Any) -> Any:
    return next((getattr(config, k) for k in keys if getattr(config, k, None) is not None), default)


def _logit_scale(config: Any) -> float:
    """Cohere multiplies logits by `logit_scale`; Granite divides them by `logits_scaling`."""
    if getattr(config, "logit_scale", None):
        return float(config.logit_scale)
    if getattr(config, "logits_scaling", None):
        return 1.0 / float(config.logits_scaling)
    return 1.0


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters that require gradients; tied ones once, under their first name."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
