"""SPAM: Adam that clips single gradient spikes against its own second moment and forgets both moments now and then.

Huang et al., "SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training", 2025, arXiv 2501.06842, algorithm 1:

    every `every` steps: m, v ← 0, and the rate climbs back over `warmup` steps (`skimp.optim.restarts`)
    where g² > θ·v and v > 0, once `after` steps of a period have passed: g ← sign(g)·√(θ·v)
    m ← β₁·m + (1−β₁)·g;  v ← β₂·v + (1−β₂)·g²
    p ← p − scale·lr·√(1−β₂ᵏ)/(1−β₁ᵏ) · m/(√v + eps);   p ← p − lr·wd·p

Order and place of eps are the paper's, not AdamW's. v is not bias-corrected where it is compared, so a clip is looser
than √θ = 70.7 root mean squares early in a period. Where v = 0 nothing is clipped: the released rule would clip such a
gradient to 0, v would stay 0, and the row of a token not met in the first `after` steps would not learn before the next
reset.

**Sparse momentum.** With `density` d below 1 a hidden matrix keeps moments of d·n of its n numbers only, and moves only
these; every period draws others. The numbers are one from each of d·n equal runs, drawn from (seed, name, period) by
counter-based noise: no mask is stored (the paper's takes a byte a weight, half of what it saves), the count is exact,
and a resume draws the same. Decay, too, is theirs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import count
from skimp.core.sharded import Part, largest_part
from skimp.optim.adam_mini import check_role
from skimp.optim.base import UpdateRule
from skimp.optim.elementwise import wide_dtype
from skimp.optim.muon import is_hidden
from skimp.optim.options import check_dtype, check_options, check_range, lr_of
from skimp.optim.restarts import restart_at
from skimp.optim.spam_chunk import spam
from skimp.optim.spam_sparse import spam_sparse
from skimp.optim.state import Spec


class SPAM(UpdateRule):
    """SPAM. State: m and v shaped like the parameter, or (int(density·n),) of a hidden matrix with density below 1.

    Args:
        params: parameters, groups or `named_parameters()`; with a density below 1 groups with roles.
        theta: θ; 0 clips nothing. every: steps between resets, 0 for none. warmup: steps over which the rate climbs
        back. after: steps at the start of a period without clipping. density: share of a hidden matrix's numbers with
        moments. keep_count: leave the step of the bias correction running at a reset, as the released code does.

    Raises:
        SkimpError: an option out of range, a dtype it cannot step, a density without roles.
    """

    rule: ClassVar[str] = "spam"
    by_role = True

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        theta: float = 5000.0,
        every: int = 500,
        warmup: int = 150,
        after: int = 20,
        density: float = 1.0,
        keep_count: bool = False,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        endless = float("inf")
        check_range(self.rule, theta=(theta, 0.0, endless), every=(every, 0, endless), after=(after, 0, endless))
        longest = max(0, every - 1) if every else endless
        check_range(self.rule, density=(density, 1e-6, 1.0), warmup=(warmup, 0, longest))
        self.density = density
        own = {"theta": theta, "every": every, "warmup": warmup, "after": after, "keep_count": keep_count}
        shared = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, {"lr": lr, **own, **shared})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)
        if self.density < 1:
            check_role(self.rule, name, self.group_of(p))

    def sparse(self, p: Tensor) -> bool:
        """Whether moments of some numbers of `p` only are kept."""
        return self.density < 1 and is_hidden(p, self.group_of(p)) and int(self.density * count(largest_part(p))) > 0

    def moves_all(self, p: Tensor) -> bool:
        """Whether an update moves every number of `p` that has a gradient, and not a chosen few."""
        return not self.sparse(p)

    def block_of(self, p: Tensor) -> int:
        # Which numbers are kept depends on the whole part: never read another part's as one's own.
        return p.numel() + 1 if self.sparse(p) else 1

    def part_spec(self, p: Tensor) -> Spec:
        spec = super().part_spec(p)
        if not self.sparse(p):
            return spec
        kept = (int(self.density * count(largest_part(p))),)
        return {key: (kept, dtype) for key, (_, dtype) in spec.items()}

    def rule_for(self, p: Tensor) -> str:
        return f"{self.rule} ({self.density:g} of the numbers)" if self.sparse(p) else self.rule

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        wide = wide_dtype(dtype)
        return {"m": (tuple(shape), wide), "v": (tuple(shape), wide)}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        check_dtype(self.rule, part.name, grad)
        at = restart_at(state["step"], group["every"], group["warmup"], group["keep_count"])
        (beta1, beta2), lr = group["betas"], lr_of(group)
        clips = at.since >= group["after"] and math.isfinite(group["theta"])
        size = at.scale * lr * math.sqrt(1.0 - beta2**at.count) / (1.0 - beta1**at.count)
        scalars = [beta1, beta2, group["eps"], size, lr * group["weight_decay"]]
        scalars += [group["theta"] if clips else 0.0, float(at.reset)]
        held = [state["m"], state["v"]]
        if held[0].numel() != p.numel():
            spam_sparse(part, p, grad, held, scalars, state["step"], at.period, group["seed"])
        else:
            spam(part, p, grad, held, scalars, state["step"], group["seed"])
