"""A change of basis is an event: what becomes of the moments, and how long the next basis holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.read import read
from skimp.optim.stages import Place, Stages

#: Q-GaLore: a layer's period doubles while the mean of the last five similarities is at least this.
ALIKE, QUEUE, GROWTH = 0.4, 5, 2


def check_policy(rule: str, stages: Stages) -> None:
    """Carrying moments over is arithmetic on their numbers.

    Raises:
        SkimpError: they are coded in 8 bits, or are not Adam's two.
    """
    keys = set(stages.inner.state_spec((2, 2), torch.float32))
    if stages.policy == "rotate" and not {"m", "v"} <= keys:
        raise SkimpError(
            f"{rule}: policy rotate with an inner rule of states {', '.join(sorted(keys)) or 'none'}",
            "not a first and a second moment",
            "a second moment turns only together with the first, as the variance about it",
            ("policy: align, which turns the basis instead", "inner: adam"),
        )
    if stages.policy == "rotate" and stages.states == "int8":
        raise SkimpError(
            f"{rule}: policy rotate with int8 states",
            "8-bit codes",
            "turning the moments mixes all rows, and coding them again at every change would add an error each time",
            ("policy: align, which turns the basis instead", "states: fp32 or bf16"),
        )


def carry_over(stages: Stages, old: Tensor | None, state: dict[str, Any], place: Place) -> Tensor | None:
    """Bring the moments of the `old` basis to the new one in `state`, by the policy.

    Returns:
        With feedback and `rotate`: β₁/(1−β₁)·(P_old·M − P·C·M) (a, b), the momentum that the new basis cannot hold.
    """
    if stages.policy == "reset":
        for key in stages.inner.state_spec((place.rank, place.columns), torch.float32):
            if key in state:
                state[key].zero_()
        state["since"] = 0
        return None
    new = stages.projector.basis(state, place)
    if stages.policy == "keep" or old is None or new is None:
        return None
    if stages.policy == "align":
        left, _, right = torch.linalg.svd(torch.mm(new.t(), old), full_matrices=False)
        new.copy_(torch.mm(new, torch.mm(left, right)))
        return None
    return _rotate(torch.mm(new.t(), old), old, new, stages.feedback, state, place)


def _rotate(
    turn: Tensor, old: Tensor, new: Tensor, feedback: bool, state: dict[str, Any], place: Place
) -> Tensor | None:
    """M ← C·M with C = PᵀP_old; V by the estimate of LDAdam (Robert et al., 2024, arXiv 2410.16103, algorithm 1).

    V̂ − M̂² is read as the variance of independent coordinates, which turn by C∘C; the mean turns by C. Both moments
    are corrected for bias first, and V is given its bias again.
    """
    beta1, beta2 = place.group["betas"]
    steps, work = state["since"], turn.dtype
    m, v = state["m"].to(work), state["v"].to(work)
    moved = torch.mm(turn, m)
    if steps > 0:
        bias1, bias2 = 1.0 - beta1**steps, 1.0 - beta2**steps
        spread = torch.mm(turn.square(), v / bias2 - (m / bias1).square())
        state["v"].copy_((spread + (moved / bias1).square()).abs() * bias2)
    lost = None
    if feedback:
        lost = (torch.mm(old, m) - torch.mm(new, moved)) * (beta1 / (1.0 - beta1))
    state["m"].copy_(moved)
    return lost


def lengthen(old: Tensor | None, new: Tensor | None, state: dict[str, Any], place: Place) -> None:
    """Q-GaLore's lazy refresh (arXiv 2407.08296, section 3.3): the period doubles while bases stay alike.

    Compared are the first singular vectors of successive bases, by the size of their cosine: the sign of a singular
    vector means nothing, and taken signed (as released) an arbitrary flip would count as a turn. The queue of five is
    not cleared, so while the mean stays high the period doubles at every refresh from the sixth basis on.
    """
    state["gap"] = state["gap"] or place.group["refresh"]
    if old is None or new is None:
        return
    one, two = old[:, 0], new[:, 0]
    cosine = torch.dot(one, two).abs() / (one.norm() * two.norm()).clamp_min(1e-30)
    state["alike"][state["seen"] % QUEUE] = cosine
    state["seen"] += 1
    if state["seen"] >= QUEUE and read(state["alike"].mean(), expect=0.0) >= ALIKE:
        state["gap"] *= GROWTH
