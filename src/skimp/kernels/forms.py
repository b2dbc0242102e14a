"""The kernels by name and form: plain reference, native C on a CPU, Triton on a card, one signature each.

`kernel("rms_norm", "native")` is one form. `kernel("rms_norm")` takes for each call the form that its first tensor
allows: Triton on a CUDA device, the native one on a CPU where it is built and takes the tensors, else the reference.
Triton is imported when one of its forms is called for the first time, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import Tensor

from skimp.core.errors import SkimpError, did_you_mean

Form = Literal["reference", "native", "triton"]

#: name -> (module of reference and native form, module of the Triton form under `triton`)
FORMS: dict[str, tuple[str, str]] = {
    "rms_norm": ("fused", "norms"),
    "layer_norm": ("layer_norm", "norms"),
    "swiglu": ("fused", "gates"),
    "geglu": ("gelu", "gates"),
    "gelu": ("gelu", "gates"),
    "rotary": ("rotary", "rotary"),
    "softmax": ("softmax", "softmax"),
    "cross_entropy": ("cross_entropy", "cross_entropy"),
    "log_probs": ("cross_entropy", "cross_entropy"),
}


def kernel(name: str, form: Form | None = None) -> Callable[..., Tensor]:
    """The kernel `name` in one form, or in the one that each call's tensors allow.

    Raises:
        SkimpError: no such kernel; Triton asked for and not installed.
    """
    if name not in FORMS:
        raise SkimpError(f"kernel '{name}'", "no such name", instead=did_you_mean(name, FORMS))
    if form is None:
        return partial(_fitting, name)
    home, card = FORMS[name]
    if form == "triton":
        return _triton(name, card)
    module = importlib.import_module(f"skimp.kernels.{home}")
    found: Callable[..., Tensor] = getattr(module, f"{name}_reference" if form == "reference" else name)
    return found


def _triton(name: str, module: str) -> Callable[..., Tensor]:
    try:
        found: Callable[..., Tensor] = getattr(importlib.import_module(f"skimp.kernels.triton.{module}"), name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise SkimpError(
            f"the Triton form of {name}", "triton is not installed", instead="pip install 'skimp[triton]'"
        ) from error
    return found


def _fitting(name: str, first: Tensor, *rest: Any, **options: Any) -> Tensor:
    return kernel(name, _form_for(name, first, rest))(first, *rest, **options)


def _form_for(name: str, first: Tensor, rest: tuple[Any, ...]) -> Form:
    if first.device.type == "cuda":
        return "triton"
    from skimp.kernels.native import library
    from skimp.kernels.native.layers import LAYERS
    from skimp.kernels.rotary import fits_native as fits_rotary
    from skimp.kernels.widened import fits_native

    if not (library.available() and LAYERS.available()):
        return "reference"
    if name == "rotary":
        return "native" if fits_rotary(first, *rest) else "reference"
    floating = [t for t in (first, *rest) if isinstance(t, Tensor) and t.is_floating_point()]
    return "native" if fits_native(*floating, halves=True) else "reference"
