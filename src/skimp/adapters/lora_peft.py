"""A low-rank addition as Hugging Face PEFT writes it: the content of adapter_config.json and tensors by name.

Tensors are named `base_model.model.<module>.lora_A.weight` (r, inputs) and `.lora_B.weight` (outputs, r); a module
trained in full is `base_model.model.<module>.weight` and listed in `modules_to_save`. PEFT keeps such a module apart
from what it was tied to, so a tied embedding is written twice, as embedding and as head: both then hold what was
trained, and the logits are the same.

An addition that began from W is written as one of twice the rank on the original weights: PEFT would else begin anew
from the base it is put on.

Format: the checkpoint format page of the PEFT documentation, huggingface.co/docs/peft.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skimp.adapters.merge import A0, MAGNITUDE, A, B
from skimp.adapters.spec import Spec
from skimp.core.coded_model import linear_layers, stored_transposed

if TYPE_CHECKING:
    from skimp.adapters.lora import LoRA

PREFIX = "base_model.model."


def widening(spec: Spec) -> tuple[int, float]:
    """Factors on r and alpha of the plain form: twice the rank at the same s where the addition began from W."""
    if not spec.keeps_start:
        return 1, 1.0
    return 2, math.sqrt(2.0) if spec.scale == "rslora" else 2.0


def plain_parts(module: Any) -> dict[str, Tensor]:
    """A, B and norms of one module as a plain addition to the original weight: s (B A - B0 A0) = s [B, -B0] [A; A0]."""
    a, b = module.lora_A.detach(), module.lora_B.detach()
    if A0 in module._buffers:
        a, b = torch.cat([a, module.lora_A0]), torch.cat([b, -module.lora_B0], 1)
    found = {A: a, B: b}
    if MAGNITUDE in module._parameters:
        found[MAGNITUDE] = module.lora_magnitude_vector.detach()
    return found


def config_of(lora: LoRA, base_name: str) -> dict[str, Any]:
    """The content of adapter_config.json."""
    spec = lora.spec
    saved = [name.rpartition(".")[2] for name in _saved_modules(lora)]
    wide, high = widening(spec)
    ranks = {n: wide * spec.rank_of(n) for n in lora.modules if spec.rank_of(n) != spec.r}
    alphas = {n: high * spec.alpha_of(n) for n in lora.modules if spec.alpha_of(n) != spec.alpha}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": wide * spec.r,
        "lora_alpha": high * spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.scale == "rslora",
        # At the end gradients no longer matter, and both ways to scale the rows are one.
        "use_dora": spec.reparam != "plain",
        "target_modules": _target_modules(lora),
        "modules_to_save": saved or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": any(stored_transposed(lora.module(name)) for name in lora.modules),
        # True draws A and zeroes B before the saved tensors are read; a name such as pissa would change the base.
        "init_lora_weights": True,
        "inference_mode": True,
    }


def tensors_of(lora: LoRA) -> dict[str, Tensor]:
    """Everything trained under PEFT's names, on the host; the two names of a tied matrix are two tensors."""
    found: dict[str, Tensor] = {}
    for name in lora.modules:
        for part, tensor in plain_parts(lora.module(name)).items():
            found[f"{PREFIX}{name}.{part}" + (".weight" if part in (A, B) else "")] = tensor.cpu().contiguous()
    for name in _saved_modules(lora):
        found[f"{PREFIX}{name}.weight"] = lora.module(name).weight.detach().cpu().contiguous().clone()
    return found


def _saved_modules(lora: LoRA) -> tuple[str, ...]:
    tied = lora.structure.tied and bool(lora.full)
    return (lora.structure.embedding, lora.structure.head) if tied else lora.full


def _target_modules(lora: LoRA) -> list[str]:
    """Leaf names where they pick out the very same modules, else full names."""
    leaves = sorted({name.rpartition(".")[2] for name in lora.modules})
    layers = linear_layers(lora.model, lora.structure)
    same = {name for name in layers if name.rpartition(".")[2] in leaves} == set(lora.modules)
    return leaves if same and lora.structure.head.rpartition(".")[2] not in leaves else list(lora.modules)
