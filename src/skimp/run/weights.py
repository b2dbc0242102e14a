"""Weights from disk into a model, tensor by tensor, into storage that is already there.

Peak = the model + at most one tensor (none where the file has the model's dtype, a few MB of a GGUF). Files are
read, not memory-mapped: mapped pages count as resident, and a map's odd alignment changes the last bits of
matrix-vector products between a fresh and a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.errors import ModelError
from skimp.run.coded_base import stand_in, stored_shape, take
from skimp.run.stored import Stored, names_for, open_stored

Progress = Callable[[int, int], None]


def load_weights(model: nn.Module, source: Path, progress: Progress | None = None) -> None:
    """Fill `model`'s parameters from a folder of safetensors, one such file, or a GGUF file.

    Raises:
        ModelError: a missing, extra or differently shaped tensor, by name; an unsupported file.
    """
    stored = open_stored(source, model.config)
    try:
        fill_from(model, stored, str(source), progress)
    finally:
        stored.close()


def owners(model: nn.Module) -> dict[str, str]:
    """Every parameter name -> the first name of the same parameter: tied ones have one owner."""
    first: dict[int, str] = {}
    found = {n: first.setdefault(id(p), n) for n, p in model.named_parameters(remove_duplicate=False)}
    return found | {f"{n}.weight": f"{n}.weight" for n, _ in coded_layers(model)}


def fill_from(model: nn.Module, stored: Stored, origin: str, progress: Progress | None = None) -> None:
    """Fill every parameter of `model` from `stored`, cast to the parameter's dtype; the weight of a coded layer is read
    in the dtype it decodes to, encoded and let go.

    Raises:
        ModelError: a missing or differently shaped tensor, by name.
        SkimpError: a weight that its codec refuses.
    """
    coded = {f"{name}.weight": module for name, module in coded_layers(model)}
    targets: dict[str, Any] = {**dict(model.named_parameters(remove_duplicate=False)), **coded}
    owner = owners(model)
    wanted = set(owner.values())
    filled: set[str] = set()
    with torch.no_grad():
        for known, written in names_for(stored, targets).items():
            if owner[known] in filled and known != owner[known]:
                continue  # a tied tensor that the file holds twice
            shape, target = stored.specs()[written].shape, targets[known]
            expected = stored_shape(target) if known in coded else tuple(target.shape)
            if shape != expected:
                raise ModelError(
                    f"weights of {known} from {origin}",
                    f"shape {shape}",
                    f"the config asks for {expected}",
                    "use the config that belongs to these weights",
                )
            if known in coded:
                dense = torch.empty(shape, dtype=target.dtype)
                stored.read_into(written, dense)
                take(target, dense, known.removesuffix(".weight"))
                del dense  # before the next is read
            else:
                stored.read_into(written, target)
            filled.add(owner[known])
            if progress is not None:
                progress(len(filled), len(wanted))
    missing = sorted(wanted - filled)
    if missing:
        raise ModelError(
            f"weights for {len(wanted)} tensors from {origin}",
            f"{len(missing)} missing: {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}",
            "training would start from uninitialised memory there",
            "use a complete checkpoint, or model.init=scratch",
        )


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
        waiting: dict[str, CodedLinear] = {}
        for name, module in model.named_modules():
            # Dense while it and its parent are drawn (a parent may reach into it), then encoded: parents come first.
            for leaf, child in list(module.named_children()):
                if isinstance(child, CodedLinear):
                    waiting[f"{name}.{leaf}"] = child
                    setattr(module, leaf, stand_in(child))
            initialise(module)
            if name in waiting:
                parent, _, leaf = name.rpartition(".")
                take(waiting[name], cast("Any", module).weight, name)
                setattr(model.get_submodule(parent), leaf, waiting.pop(name))
        tie()
