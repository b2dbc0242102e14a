"""A model's structure without its weights, from an HF config alone.

`transformers` builds the modules; every parameter lands on the meta device and costs nothing, while small computed
buffers (rotary frequencies) are made for real. Then `materialise` gives the parameters storage: real and aligned,
or simulated. Both runs therefore hold the same modules with the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from skimp.core import attention
from skimp.core.cuda_attention import kernel_for
from skimp.core.errors import ModelError, did_you_mean
from skimp.core.lean import lean_imports
from skimp.core.structure import layers_of

#: Config keys that switch dropout on, by family. Fine-tuning and pre-training of these models run without it today.
DROPOUT_KEYS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "dropout",
    "activation_dropout",
    "hidden_dropout",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "layerdrop",
    "summary_first_dropout",
)


class _ParametersOnMeta(TorchFunctionMode):
    """While active, `torch.empty` and friends that modules use for parameters give meta tensors."""

    FACTORIES = frozenset({torch.empty, torch.ones, torch.zeros})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.FACTORIES and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def skeleton(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build a causal LM on the meta device from the content of an HF `config.json`.

    Dropout probabilities are set to 0 (see `dropout_of` for what was found).

    Raises:
        ModelError: unknown `model_type`, or a model without a causal LM head.
    """
    with lean_imports():
        return _skeleton(config, dtype)


def _skeleton(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    described = _described(config)
    if type(described) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"a causal language model of type '{config.get('model_type')}'",
            "an architecture without a causal LM head",
            "skimp trains decoder-only language models",
            "use a decoder-only model such as llama, qwen2 or gpt2",
        )
    for key in DROPOUT_KEYS:
        if getattr(described, key, None):
            setattr(described, key, 0.0)
    described._attn_implementation = attention.register()
    described.use_cache = False
    with _ParametersOnMeta(), no_init_weights(), _default_dtype(dtype):
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(described)]
        model: nn.Module = architecture(described)
    tie: Any = model.tie_weights
    tie()
    return model.train()


def _described(config: dict[str, Any]) -> Any:
    """transformers' object for a config."""
    from transformers import AutoConfig

    facts = {k: v for k, v in config.items() if k not in ("transformers_version", "architectures", "auto_map")}
    kind = facts.pop("model_type", None)
    try:
        described = AutoConfig.for_model(str(kind), **facts)
    except (ValueError, KeyError) as error:
        from transformers import CONFIG_MAPPING

        raise ModelError(
            f"a model of type '{kind}'",
            "an architecture transformers does not know",
            "code from a model's own repository is never run (trust_remote_code is off)",
            did_you_mean(str(kind), list(CONFIG_MAPPING.keys())),
        ) from error
    return described


def kinds_of_blocks(config: dict[str, Any], seq_len: int) -> tuple[str, ...]:
    """What tells a model's blocks apart at rows of `seq_len` tokens: the kind of attention of each, in their order.

    A window that a row fits into is full attention.
    """
    with lean_imports():
        described = _described(config)
    window = getattr(described, "sliding_window", None)
    kinds = getattr(described, "layer_types", None)
    if not kinds or window is None or window >= seq_len:
        return ("attention",) * int(config[layers_of(config)])
    return tuple(kinds)


def attention_operators(config: dict[str, Any], seq_len: int, target: str, dtype: torch.dtype) -> tuple[bool, ...]:
    """Of each block, whether its attention is one operator, whose result can be kept by itself (`exact.keep`).

    On a CPU a window that a row does not fit into, and a cap on the scores, go block of scores by block.

    Args:
        config: content of the model's HF config.json. seq_len: tokens of a row.
        target: "cpu", or "cuda:" and a capability, as plans declare it.
        dtype: of queries, keys and values.
    """
    with lean_imports():
        described = _described(config)
    blocks, cap = int(config[layers_of(config)]), getattr(described, "attn_logit_softcapping", None)
    device, _, capability = target.partition(":")
    if device != "cpu":
        heads, width = int(described.num_attention_heads), int(described.hidden_size)
        dim = int(getattr(described, "head_dim", None) or width // heads)
        return (kernel_for(capability, dtype, dim, cap) != "blocks",) * blocks
    window = getattr(described, "sliding_window", None)
    narrow = window is not None and window < seq_len
    kinds = getattr(described, "layer_types", None) or ("sliding_attention",) * blocks
    return tuple(cap is None and not (narrow and "sliding" in kind) for kind in kinds[:blocks])


def dropout_of(config: dict[str, Any]) -> dict[str, float]:
    """The dropout settings a config asks for, which skimp sets to 0 and says so."""
    return {key: config[key] for key in DROPOUT_KEYS if config.get(key)}


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def materialise(model: nn.Module, dtype: torch.dtype, make: Callable[[torch.Size, torch.dtype], Tensor]) -> None:
    """Give every meta parameter storage from `make(shape, dtype)`; tied parameters share it. In place.

    Floating parameters become `dtype`. Buffers computed at construction stay as they are.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = dtype if parameter.dtype.is_floating_point else parameter.dtype
                made[id(parameter)] = nn.Parameter(make(parameter.shape, kind), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.device.type == "meta":  # the parts of a coded layer
                module._buffers[name] = make(buffer.shape, buffer.dtype)


def simulate_tensors(model: nn.Module, dtype: torch.dtype, mode: FakeTensorMode) -> None:
    """Materialise on simulated CPU tensors of `mode`; buffers are converted too. In place."""

    def make(shape: torch.Size, kind: torch.dtype) -> Tensor:
        with mode:
            return torch.empty(shape, dtype=kind, device="cpu")

    materialise(model, dtype, make)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                with mode:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
