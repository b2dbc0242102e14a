"""The side network: the backbone's own kind of block at a width r times smaller, fed with its hidden states.

With f_0 the embeddings and f_l what block l of the frozen backbone gave, b_l = sigmoid(z_l):

    h_0 = D_1(f_0),  h_l = block_l((1 - b_l) D_l(f_l) + b_l h_(l-1)),  h = norm(h_L)

Every gradient stays here: the backbone runs without recording any. A block of width d / r has about 1 / r^2 of the
parameters and 1 / r of the activations; with a downsampler that trains f_l is kept too, T d numbers a block.

Source: "Quantized Side Tuning", Zhang et al., ACL 2024, arXiv 2401.07159, section 3.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.side_down import downsampler
from skimp.core import noise
from skimp.core.errors import ConflictError
from skimp.core.read import is_simulated
from skimp.core.structure import Structure

#: Norms that store their gain less 1 begin at 0.
SHIFTED = "Gemma"


class Rung(nn.Module):
    """One step of the ladder: mix, then a block.

    Attributes:
        down: from f_l; the first one serves f_0 as well. z: (d / r,), the mixing's logit.
        block: of the backbone's kind.
    """

    def __init__(self, down: nn.Module, width: int, block: nn.Module) -> None:
        super().__init__()
        self.down, self.block = down, block
        self.z = nn.Parameter(torch.empty(width, dtype=torch.float32))

    def mix(self, tap: Tensor, before: Tensor) -> Tensor:
        """(1 - b) D(f) + b h."""
        return torch.lerp(self.down(tap).to(self.z.dtype), before.to(self.z.dtype), torch.sigmoid(self.z))


class SideNetwork(nn.Module):
    """The rungs, their norm, the way back up and the gate, on `torch.empty` storage until `begin`.

    Args:
        model, structure: the backbone.
        reduce: r. down: a form of `side_down`.

    Raises:
        ConflictError: widths that r does not divide; names the nearest r that does.
    """

    def __init__(self, model: nn.Module, structure: Structure, reduce: int, down: str) -> None:
        super().__init__()
        check_reduce(model, structure, reduce)
        base: Any = model.get_submodule(structure.base)
        width, count = structure.hidden // reduce, len(structure.blocks)
        self.config = small_config(model, structure, reduce)
        device = next(model.parameters()).device
        kind: Any = type(model.get_submodule(structure.blocks[0]))
        rungs = []
        for index in range(count):
            with torch.device("meta"):
                block = kind(self.config, layer_idx=count + index)
                rungs.append(Rung(downsampler(down, structure.hidden, width), width, block))
        self.rungs = nn.ModuleList(rungs)
        with torch.device("meta"):
            self.norm = nn.RMSNorm(width, eps=1e-6, dtype=torch.float32)
            self.up = nn.Linear(width, structure.hidden, dtype=torch.float32)
            self.gate = nn.Parameter(torch.empty(structure.hidden, dtype=torch.float32))
        _materialise(self, device)
        #: Angles for the side's own head width; None where positions are in the embeddings.
        turned = getattr(base, "rotary_emb", None)
        self.rotary = None if turned is None else type(turned)(config=self.config)

    @torch.no_grad()
    def begin(self, seed: int, gate: float, up: bool) -> None:
        """First numbers: matrices uniform within 1 / sqrt(inputs), norms 1, biases 0, z 1/2; Up zero unless `up`."""
        if is_simulated(self.gate):
            return
        for name, parameter in self.named_parameters():
            leaf, module = name.rpartition(".")[2], self.get_submodule(name.rpartition(".")[0])
            if name == "gate":
                parameter.fill_(gate)
            elif leaf == "z":
                parameter.fill_(0.5)
            elif name == "up.weight" and not up:
                parameter.zero_()
            elif parameter.dim() == 1:
                shifted = type(module).__name__.startswith(SHIFTED)
                parameter.fill_(1.0 if leaf == "weight" and not shifted else 0.0)
            else:
                inputs = parameter.shape[0] if type(module).__name__ == "Conv1D" else parameter.shape[1]
                drawn = noise.uniform(seed, f"side.{name}", 0, parameter.numel(), device=parameter.device)
                parameter.copy_(drawn.sub_(0.5).mul_(2.0 / inputs**0.5).view(parameter.shape))


def _materialise(side: nn.Module, device: torch.device) -> None:
    """float32 storage on `device`, real or of the simulation around this call, for whatever was built without."""
    for module in side.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                made = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                module._parameters[name] = nn.Parameter(made)


def small_config(model: nn.Module, structure: Structure, reduce: int) -> Any:
    """The backbone's config at width d / r: as many heads, each r times narrower, and so the MLP.

    It names twice the layers: the side's share the backbone's cache, behind the backbone's own.
    """
    config: Any = copy.deepcopy(getattr(model, "config"))  # noqa: B009
    config.hidden_size = structure.hidden // reduce
    if getattr(config, "head_dim", None):
        config.head_dim = structure.head_dim // reduce
    for key in ("intermediate_size", "n_inner", "ffn_dim"):
        if getattr(config, key, None):
            setattr(config, key, max(1, getattr(config, key) // reduce))
    if hasattr(config, "word_embed_proj_dim"):
        config.word_embed_proj_dim = config.hidden_size
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, *config.layer_types]
    return config


def check_reduce(model: nn.Module, structure: Structure, reduce: int) -> None:
    """Each head must stay whole numbers wide, and an even number where its halves are turned.

    Raises:
        ConflictError: names the reductions that work.
    """
    turned = hasattr(model.get_submodule(structure.base), "rotary_emb")

    def fits(r: int) -> bool:
        head = structure.head_dim
        return structure.hidden % r == 0 and head % r == 0 and head // r >= 1 and not (turned and head // r % 2)

    if fits(reduce):
        return
    ways = [r for r in range(2, structure.head_dim + 1) if fits(r)]
    near = sorted(ways, key=lambda r: abs(r - reduce))[:2]
    raise ConflictError(
        f"adapter.reduce={reduce}",
        f"hidden {structure.hidden}, {structure.heads} heads of {structure.head_dim}",
        f"the side network has as many heads, each {structure.head_dim} / {reduce} wide"
        + (", which must be a whole even number for rotary positions" if turned else ", which must be a whole number"),
        [f"adapter.reduce={r}" for r in near] or ["adapter=lora"],
    )
