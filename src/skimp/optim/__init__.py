"""optim: update rules, listed without importing them (no torch here)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skimp.core.option import ADAM
from skimp.core.registry import Conflict, Facts, Paper
from skimp.optim.family_facts import FAMILY, FAMILY_HOMES
from skimp.optim.rule_facts import HOMES, RULES

FACTS: list[Facts] = [
    Facts(
        name="adamw",
        kind="update rule",
        summary="AdamW with float32 states, in place through torch's fused kernel: the yardstick.",
        where="skimp.optim.adamw:AdamW",
        attacks=(),
        exact=True,
        saves="8 bytes of state per parameter, no temporaries",
        options=ADAM,
        paper=Paper("Decoupled Weight Decay Regularization", 2017, "1711.05101"),
        conflicts={
            "bf16": Conflict(
                "rounding to nearest loses every update below the weight's step (bfloat16: 0.4 % of the weight)",
                "adamw-bf16, which rounds at random so that the mean is kept; or adamw8bit, which does too",
            ),
            "dynamic8": Conflict(
                "its moments are kept as computed; rounded to 8 bits after every step they are those of another rule",
                "adamw8bit",
            ),
        },
    ),
    Facts(
        name="adamw8bit",
        kind="update rule",
        summary="AdamW with block-wise dynamic 8-bit moments (tensors under 4,096 elements keep float32).",
        where="skimp.optim.adamw8bit:AdamW8bit",
        attacks=("optimizer",),
        exact=False,
        saves="2 + 8/256 = 2.03 bytes of state per parameter instead of 8",
        paper=Paper("8-bit Optimizers via Block-wise Quantization", 2021, "2110.02861"),
        options=ADAM,
    ),
    Facts(
        name="adamw-bf16",
        kind="update rule",
        summary="AdamW on pure bf16 weights with stochastic rounding and no float32 copy.",
        where="skimp.optim.adamw_bf16:AdamWBF16",
        attacks=("weights", "gradients", "optimizer"),
        exact=False,
        saves="8 bytes per parameter (weight 2, gradient 2, states 4) instead of 16",
        paper=Paper("Revisiting BFloat16 Training", 2020, "2010.06192"),
        needs=("bf16 parameters: model.to(torch.bfloat16)",),
        options=ADAM,
        conflicts={
            "dynamic8": Conflict(
                "its moments are bfloat16 or float32, rounded at random; coded in blocks they are another rule's",
                "adamw8bit on bfloat16 weights (precision: bf16, optimizer: adamw8bit)",
            ),
            "adapter": Conflict(
                "what trains beside a frozen base is float32, where no update is lost and nothing has to be rounded at "
                "random",
                "optimizer: adamw; with precision: bf16 the base alone is bfloat16",
            ),
        },
    ),
    *RULES,
    *FAMILY,
    Facts(
        name="momentum-reset",
        kind="step",
        summary="all moments begin anew every so many steps, the rate climbs back; pairs of factors may be balanced",
        where="skimp.optim.refactor:reset_moments",
        attacks=(),
        exact=False,
        saves="no bytes: what was learned of old gradients is forgotten before it misleads",
        paper=Paper("Scalable Parameter and Memory Efficient Pretraining for LLM", 2025, "2505.22922"),
        recipe="train: {restart: {every: 200, warmup: 10}}",
        conflicts={
            "spam": Conflict(
                "it begins its own moments anew by a count of its own steps, which a second schedule would set back "
                "each time, so that the first would never come to an end",
                "optimizer: {name: spam, every: 200, warmup: 10}, or momentum-reset with another rule",
            ),
            "stable-spam": Conflict(
                "it begins its own moments anew by a count of its own steps, which a second schedule would set back "
                "each time, so that the first would never come to an end",
                "optimizer: {name: stable-spam, every: 200}, or momentum-reset with another rule",
            ),
        },
    ),
    Facts(
        name="state-offload",
        kind="placement",
        summary="optimizer states live in a mapped file (a card: in host memory), here for their own update only",
        where="skimp.core.state_file:StateFile",
        attacks=("optimizer",),
        exact=True,
        saves="all states but 16 MiB (of matrix rules one's): 8 bytes a parameter with AdamW, for their way in and out",
        paper=Paper("ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", 2021, "2104.07857"),
        needs=("a folder on a disk, not in memory",),
        recipe="exact: {offload: {optimizer: disk}}",
    ),
]

_HOMES = {
    **HOMES,
    **FAMILY_HOMES,
    "AdamW": "adamw",
    "AdamW8bit": "adamw8bit",
    "AdamWBF16": "adamw_bf16",
    "UpdateRule": "base",
    "adamw_reference": "adamw",
    "decay_groups": "groups",
    "role_groups": "groups",
    "refactor_": "refactor",
    "reset_moments": "refactor",
    "restart_": "refactor",
    "roles": "role",
    "state_key": "state",
}

__all__ = [
    "CAME",
    "FACTS",
    "SPAM",
    "Adafactor",
    "AdamMini",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWBF16",
    "Dion",
    "Lion",
    "Muon",
    "StableSPAM",
    "UpdateRule",
    "adamw_reference",
    "decay_groups",
    "refactor_",
    "reset_moments",
    "restart_",
    "role_groups",
    "roles",
    "state_key",
]

if TYPE_CHECKING:
    from skimp.optim.adafactor import Adafactor
    from skimp.optim.adam_mini import AdamMini
    from skimp.optim.adamw import AdamW, adamw_reference
    from skimp.optim.adamw4bit import AdamW4bit
    from skimp.optim.adamw8bit import AdamW8bit
    from skimp.optim.adamw_bf16 import AdamWBF16
    from skimp.optim.base import UpdateRule
    from skimp.optim.came import CAME
    from skimp.optim.dion import Dion
    from skimp.optim.groups import decay_groups, role_groups
    from skimp.optim.lion import Lion
    from skimp.optim.muon import Muon
    from skimp.optim.refactor import refactor_, reset_moments, restart_
    from skimp.optim.role import roles
    from skimp.optim.spam import SPAM
    from skimp.optim.stable_spam import StableSPAM
    from skimp.optim.state import state_key


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"skimp.optim.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'skimp.optim' has no attribute '{name}'")
