"""Which linear layers an adapter goes on: by name, by expression, or all of them; nothing matches in silence.

A list names leaves or ends of names, as in Hugging Face PEFT: "q_proj" is every module called so, "3.mlp.up_proj" one.
Each entry must match. An expression must match a whole name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from skimp.adapters.spec import ALL_LINEAR
from skimp.core.coded_model import is_transposed, linear_layers
from skimp.core.errors import SkimpError, did_you_mean
from skimp.core.structure import Structure

__all__ = ["TargetError", "adapted", "is_transposed", "linear_layers", "match"]


class TargetError(SkimpError):
    """Targets that match nothing, or only in part, or what is no linear layer."""


def adapted(model: nn.Module, structure: Structure) -> str | None:
    """The first linear layer that has parameters beside its weight and bias, hence an adapter; None without one."""
    layers = linear_layers(model, structure).items()
    return next((name for name, module in layers if module._parameters.keys() - {"weight", "bias"}), None)


def match(model: nn.Module, structure: Structure, targets: str | Sequence[str]) -> dict[str, str]:
    """Module name -> the target it matched, in the model's order.

    Args:
        model: an HF causal language model, on any device. structure: its roles.
        targets: see `Spec.targets`.

    Raises:
        TargetError: a target that matches nothing (with near names), or the embedding, the head, or a module that is
            no linear layer.
    """
    layers = linear_layers(model, structure)
    if targets == ALL_LINEAR:
        return dict.fromkeys(layers, ALL_LINEAR)
    if isinstance(targets, str):
        found = {name: targets for name in layers if re.fullmatch(targets, name)}
        if not found:
            raise _nothing(targets, model, structure, layers)
        return found
    found = {}
    for target in targets:
        names = [name for name in layers if _ends(name, target)]
        if not names:
            raise _nothing(target, model, structure, layers, [t for t in targets if t != target])
        for name in names:
            found.setdefault(name, target if target != name else name.rpartition(".")[2])
    return {name: found[name] for name in layers if name in found}


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _nothing(
    target: str, model: nn.Module, structure: Structure, layers: dict[str, nn.Module], others: Sequence[str] = ()
) -> TargetError:
    """Why a target matched nothing, with the nearest thing that works."""
    asked = f"adapter.targets: '{target}'"
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    beside = f"; the other{'s' if len(others) > 1 else ''} would: {', '.join(others)}" if others else ""
    for name, key in ((structure.embedding, "embeddings"), (structure.head, "head")):
        if _ends(name, target):
            return TargetError(
                asked,
                f"{name}, the model's {'token embedding' if key == 'embeddings' else 'output head'}",
                "additions go on the linear layers below the head",
                f"adapter.{key}=true: train it in full",
            )
    other = next((type(m).__name__ for n, m in model.named_modules() if n not in layers and _ends(n, target)), None)
    if other is not None:
        return TargetError(asked, f"a {other}", "an addition goes on a linear layer", f"targets: {', '.join(leaves)}")
    near = did_you_mean(target, leaves)
    ways = [near if near.startswith("did") else f"targets: {', '.join(leaves)}"]
    if target in leaves:
        ways = [f"adapter.targets=[{target}]: one text is an expression over whole names, a list matches their ends"]
    elif near.startswith("did"):
        ways.append(f"all there are: {', '.join(leaves)}")
    return TargetError(asked, f"no linear layer of that name among {len(layers)}{beside}", "", ways)
