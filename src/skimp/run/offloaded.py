"""Where what is offloaded goes in a run: real places for real tensors, counted ones for simulated tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from skimp.activations.offload import Offload
from skimp.core import attention
from skimp.core.away import Away
from skimp.core.disk import GROWTH, DiskTier, open_unnamed
from skimp.core.errors import ConflictError, RecipeError
from skimp.core.exact import ExactChoices, Place
from skimp.core.pinned import HostTier
from skimp.core.state_file import StateFile
from skimp.core.state_host import HostStates, SimulatedHostStates
from skimp.core.structure import Structure
from skimp.core.through_host import DiskThroughHost
from skimp.core.tiers import SimulatedDisk, SimulatedHost, Tier, Traffic
from skimp.run.folder import OFFLOAD


def folder(recipe: Any) -> Path:
    """Where files without names are made: the recipe's folder, or one in the run's output."""
    named = recipe.exact.offload.folder
    return Path(named) if named else Path(recipe.output) / OFFLOAD


def offload(
    model: nn.Module, structure: Structure, exact: ExactChoices, recipe: Any, simulated: bool
) -> Offload | None:
    """The chosen blocks, wrapped; None without any.

    Raises:
        RecipeError, OSError: the folder is in memory, or cannot be written.
    """
    if not exact.offload:
        return None
    tier: Tier
    if exact.offload_to == "host":
        tier = SimulatedHost() if simulated else HostTier()
    else:
        on_card = next(model.parameters()).device.type == "cuda"
        tier = SimulatedDisk() if simulated else (DiskThroughHost if on_card else DiskTier)(folder(recipe))
    return Offload(model, structure.blocks, exact.offload, tier)


def states_away(exact: ExactChoices, recipe: Any, simulated: bool) -> Away | None:
    """The place of optimizer states; None for beside their parameters.

    Raises:
        RecipeError, OSError: as `offload`.
    """
    if exact.states == "device":
        return None
    if exact.states == "host":
        return SimulatedHostStates() if simulated else HostStates()
    return Away() if simulated else StateFile(folder(recipe))


def check_disk(exact: ExactChoices, recipe: Any) -> None:
    """A file can be made where something is to wait: asked before anything is loaded.

    Raises:
        RecipeError: it cannot, or the folder is in memory.
    """
    if (exact.offload and exact.offload_to == "disk") or exact.states == "disk":
        where = folder(recipe)
        try:
            os.close(open_unnamed(where))
        except OSError as error:
            raise RecipeError(
                f"exact.offload in {where}",
                error.strerror or str(error),
                "what waits on disk is written there",
                ["exact.offload.folder=… that can be written", "exact.offload={activations: none, optimizer: none}"],
            ) from error


def check_places(exact: ExactChoices) -> None:
    """Nothing can wait in the memory that computes.

    Raises:
        ConflictError: something is to.
    """
    host = (exact.offload and exact.offload_to == "host") or exact.states == "host"
    if host and attention.target_device() == "cpu":
        raise ConflictError(
            "offload to the host",
            "a run on the CPU",
            "it computes in host memory: what waits there has gone nowhere",
            ["exact.offload.activations=disk", "exact.offload.optimizer=disk"],
        )


def held(run: Any) -> dict[Place, int]:
    """Bytes that a run holds outside the computing memory, at most, by place."""
    found: dict[Place, int] = {}
    if run.offload is not None:
        tier = run.offload.tier
        # The file grows in large pieces, so that the file system is seldom asked.
        found[tier.place] = tier.size + (GROWTH if tier.place == "disk" else 0)
    away = run.optimizer.away
    if away is not None:
        found[away.place] = found.get(away.place, 0) + away.nbytes
    return found


def traffic(run: Any) -> Traffic:
    """What the activations of the run's present wrappers moved, and what it cost."""
    return Traffic() if run.offload is None else run.offload.tier.traffic()


def moved(run: Any) -> dict[Place, tuple[int, int]]:
    """Bytes of activations (out, back) so far, by place."""
    tier = None if run.offload is None else run.offload.tier
    return {} if tier is None else {tier.place: (tier.written, tier.fetched)}
