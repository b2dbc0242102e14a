"""bfloat16 tensors in front of float32 kernels: widened for the call, the result rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """float32 as it is, anything else as a float32 copy."""
    return x if x.dtype == torch.float32 else x.float()


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to `dtype` where it is another."""
    return x if x.dtype == dtype else x.to(dtype)


def fits_native(*tensors: Tensor, halves: bool = False) -> bool:
    """Whether the native form takes these: contiguous, on a CPU, float32 or, with `halves`, widened from bfloat16.

    Facts of shape and type, never of values."""
    kinds = (torch.float32, torch.bfloat16) if halves else (torch.float32,)
    return all(t.dtype in kinds and t.is_contiguous() and t.device.type == "cpu" for t in tensors)
