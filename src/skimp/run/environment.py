"""What a bit-equal resume depends on besides the checkpoint: versions, CPU capability, threads, device."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Plain values, stored with every checkpoint and in the summary."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
    for package in ("skimp", "torch", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch"] = str(torch.__version__)  # with the build, +cpu or +cu130: metadata leaves it out
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    found["threads"] = torch.get_num_threads()
    found["mkl_cbwr"] = os.environ.get("MKL_CBWR", "")
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    return found


#: Kernels, their order of summation and random streams depend on these; the rest is for the record.
DECISIVE = ("torch", "machine", "cpu_capability", "threads", "mkl_cbwr", "device")


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence on each decisive value that changed since `saved`; none: a resume will be bit-equal."""
    return [
        f"{key} was {saved.get(key, 'not noted')} and is {now.get(key, 'not noted')}: "
        "the resumed run is right but not bit-equal to an unbroken one"
        for key in DECISIVE
        if saved.get(key) != now.get(key)
    ]
