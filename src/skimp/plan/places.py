"""What each place may hold: the device, the host's process, the disk; and what the process takes before any tensor.

On a CPU the budget is for the whole process: the interpreter and its libraries (measured in this process, never a
constant), the tracked tensors, and what the allocator and libraries add on top (`plan.slack`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from skimp.core.memory.process import Policy, malloc_policy, resident
from skimp.core.memory.room import Room
from skimp.core.memory.warm import warm_baseline
from skimp.core.structure import layers_of
from skimp.core.units import format_bytes
from skimp.kernels.native import pool
from skimp.plan import history
from skimp.plan.seen import More, Seen, seen
from skimp.plan.slack import POOL_ROOM, Shape, allowance, beside
from skimp.run.offloaded import folder


@dataclass(frozen=True)
class Places:
    """Budgets in bytes, None for no limit asked, and the process's own bytes on the host.

    Attributes:
        device: "cpu" or the name of a card; device_budget: bytes usable on it (the host's on a CPU).
        host, disk: budgets of the other places.
        baseline: resident bytes of this process before any tensor of the run.
        why: where each number is from, one sentence each.
        card: the card's facts, None on a CPU.
        available: on a CPU, what this machine has now for the process, whatever the budget says; a plan may be for a
            larger machine, a run is not.
        seen: what earlier runs on this machine took; what they took above the rule is added to it.
        shape: what the allowance beside tensors depends on (`plan.slack`).
        near: on a CPU the nearest existing folder to where offloaded tensors would go.
        count: cards of this kind, each with these budgets; a plan for several shards by formula (`plan.sharded`).
        text_bytes: of the text as tokens on disk, where it is ready and the recipe names a disk budget.
    """

    device: str
    device_budget: int
    host: int
    disk: int
    baseline: int
    why: tuple[str, ...]
    card: Any = None
    available: int | None = None
    seen: Seen = field(default_factory=Seen)
    shape: Shape = field(default_factory=Shape)
    near: str = ""
    text_bytes: int = 0
    count: int = 1

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def tensor_budget(self, policy: Policy = "return") -> int:
        """Tracked bytes that fit: on a CPU the budget less the process's own bytes and the slack, on a card less the
        matrix library's workspaces; what lies in pieces there is known once a choice is made (`plan.reserve`)."""
        if not self.on_cpu:
            return self.device_budget - 2 * self.card.workspace_bytes
        fixed, share = allowance(policy, self.shape, malloc_policy() is not None)
        left, more = self.device_budget - self.baseline - fixed, self.seen.more.get(policy, More())
        return int(min((left - more.bytes) / (1 + share), left / (1 + share + more.share)))

    def resident_peak(self, tracked: int, policy: Policy = "return") -> int:
        """Predicted resident bytes of the process for a tracked peak."""
        rule = beside(tracked, policy, self.shape, malloc_policy() is not None)
        return self.baseline + rule + self.seen.more.get(policy, More()).of(tracked)

    def pool_limit(self, tracked: int, outside: int = 0) -> int:
        """Bytes that the pool's tensors and waiting blocks together may take under "pool".

        `outside`: bytes of tensors that are always there and too small for the pool. Without them an adapter's (78 MB
        of SmolLM2's, in two thousand pieces) would be made up for by as many waiting blocks.
        """
        return tracked + POOL_ROOM - outside


def budgets(where: Places, recipe: Any) -> dict[Policy, tuple[int, float]]:
    """Tracked bytes that fit and the share of freed memory that goes back to the system, per allocator policy that the
    recipe allows; one on a card."""
    if not where.on_cpu or malloc_policy() is None:
        return {"return": (where.tensor_budget(), 0.0)}
    pinned: Policy | None = recipe.exact.malloc
    if pinned == "pool" or (pinned is None and pool.available()):
        return {"pool": (where.tensor_budget("pool"), 0.0)}
    shares: dict[Policy, float] = {"reuse": 0.0, "return": 1.0}
    return {p: (where.tensor_budget(p), share) for p, share in shares.items() if pinned in (None, p)}


def earlier(recipe: Any = None) -> Seen:
    """What this machine's log says of plans by the present rule, and of this very recipe."""
    from skimp.run.environment import environment

    def rule(row: Mapping[str, Any]) -> int:
        shape = Shape.of_record(row)
        return beside(row["planned"]["highest"], row["shape"]["malloc"], shape, malloc_policy() is not None)

    digest = "" if recipe is None else history.digest(recipe)
    return seen(history.read(), history.machine(), environment(), rule, digest)


def shape_of(recipe: Any, config: Mapping[str, Any]) -> Shape:
    """Of a run in this process."""
    blocks = int(config[layers_of(dict(config))])
    return Shape(blocks, torch.get_num_threads(), recipe.precision != "fp32", recipe.adapter is not None)


def left_to_others(available: int) -> int:
    """Bytes of those a process may have that are left free on purpose: the watchdog stops a run that leaves less."""
    left = Room().left()
    return min(available, left.floor if left is not None else 0)


def places(
    recipe: Any, config: dict[str, Any], gpu: str | None = None, memory: int | None = None, text_bytes: int = 0
) -> Places:
    """The places of a recipe on this machine, or on the card `gpu`.

    Args:
        recipe: its `device` and `budget`.
        config: the model's, to import what its run imports before the baseline is measured.
        gpu: a card name or size that replaces the recipe's device.
        memory: bytes that replace the recipe's budget on the computing device.
        text_bytes: of the text as tokens, where it is ready. It lies on the disk already, so it counts against a budget
            and not against what is free.

    Raises:
        RecipeError: an unknown card.
    """
    from skimp.recipe import host_budget, resolve_gpu

    here = host_budget()
    disk = recipe.budget.disk or shutil.disk_usage(_existing(Path(recipe.output))).free
    baseline = measure_baseline(recipe, config) if (gpu or recipe.device) == "cpu" else resident().now
    device = gpu or recipe.device
    if device == "cpu":
        asked = memory or recipe.budget.host
        said = f"budget {format_bytes(asked)} for the whole process" if asked else here.why
        most = asked or here.bytes - left_to_others(here.bytes)
        return Places(
            "cpu",
            most,
            most,
            disk,
            baseline,
            (said,),
            available=here.bytes - left_to_others(here.bytes),
            seen=earlier(recipe),
            shape=shape_of(recipe, config),
            near=str(_existing(folder(recipe))),
            text_bytes=text_bytes if recipe.budget.disk else 0,
        )
    cards = resolve_gpu("24GB" if device == "cuda" else device)
    usable = cards.card.budget_bytes
    limit = min(usable, memory or recipe.budget.device or usable)
    host = min(recipe.budget.host or here.bytes, here.bytes)
    name = cards.card.name if cards.count == 1 else f"{cards.count} x {cards.card.name}"
    why = (cards.card.basis, here.why)
    return Places(name, limit, host, disk, baseline, why, cards.card, count=cards.count)


def measure_baseline(recipe: Any, config: dict[str, Any]) -> int:
    """Resident bytes of this process once it holds everything a session needs but its tensors.

    Imports what training imports, simulates one block (which loads the model's code and the planner's), runs a
    small real step, gives back what can be given back, and reads the system's figure.
    """
    import skimp.run.session  # noqa: F401
    from skimp.core.exact import ExactChoices
    from skimp.plan.adapted import for_few_blocks
    from skimp.plan.simulate import simulate

    few = for_few_blocks(recipe, config)
    simulate(few, ExactChoices(recipe.rows_per_step), config, steps=1, blocks=1)
    return warm_baseline()


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
