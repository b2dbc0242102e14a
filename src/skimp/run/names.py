"""The names under which tensors are kept: a parameter's own name, whatever wraps the module at the moment."""

from __future__ import annotations

from typing import Any

from torch import Tensor

#: torch.compile, activation checkpointing and FSDP1 put these into the middle of names; no module is called
#: so.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def clean_name(name: str) -> str:
    """'module._orig_mod.layers.0.weight' -> 'layers.0.weight'.

    `module.` (data parallel) is a common word, so it is stripped only where a wrapper puts it: at the front.
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def storage_key(tensor: Tensor) -> Any:
    """Equal for two tensors that are the same bytes seen the same way (tied weights); None for empty ones."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    storage = tensor.untyped_storage().data_ptr()
    return (
        tensor.device,
        storage,
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )
