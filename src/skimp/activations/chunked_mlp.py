"""Chunked MLPs: a block's MLP runs a few tokens at a time, forward and backward, and keeps nothing but its input.

An MLP of width I keeps and makes 2 to 5 tensors of tokens x I numbers; at 16,384 tokens of SmolLM2-135M (I = 1,536)
each is 101 MB, and in backward four of them are there at once. Here they are as wide as a chunk. Costs the MLP's
forward once more where the block is not recomputed, and nothing where it is (`core.chunked`).

Paper: "Mini-Sequence Transformer", Luo et al., 2024, arXiv 2407.15892, section 3.1; tiled again by "Arctic Long
Sequence Training", Bekman et al., 2025, arXiv 2506.13996, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.chunked import chunked
from skimp.core.coded_trained import stand_ins
from skimp.core.errors import ConflictError, EffectError
from skimp.core.read import is_simulated, read
from skimp.core.structure import Structure

#: Largest difference, relative to the output, that products of another number of rows may make.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-3}


class ChunkedMLP:
    """Run the MLP of every block `chunk` tokens at a time; `remove` restores them.

    Args:
        model: an HF causal language model.
        structure: its roles.
        chunk: tokens at once.

    Attributes:
        names: the MLPs' full names.
        runs, widest: of each, calls of its forward, and the most tokens that one call of the plain MLP was given.

    Raises:
        ConflictError: a block has no MLP module of its own, or its MLP mixes tokens.
    """

    def __init__(self, model: nn.Module, structure: Structure, chunk: int) -> None:
        self.chunk = chunk
        self.names = tuple(mlp_names(model, structure))
        self.runs = dict.fromkeys(self.names, 0)
        self.widest = dict.fromkeys(self.names, 0)
        self._modules = [model.get_submodule(name) for name in self.names]
        refuse_mixing(self.names[0], self._modules[0], structure.hidden)
        self._under = [module.__dict__.get("forward") for module in self._modules]
        for name, module in zip(self.names, self._modules, strict=True):
            self._wrap(name, module)

    def _wrap(self, name: str, module: nn.Module) -> None:
        plain = module.forward

        def part(x: Tensor) -> Tensor:
            self.widest[name] = max(self.widest[name], x.shape[0])
            y: Tensor = plain(x)
            return y

        def forward(hidden_states: Tensor) -> Tensor:
            self.runs[name] += 1
            params = [*module.parameters(), *(p for _, p in stand_ins(module))]
            return chunked(part, hidden_states, params, self.chunk)

        module.forward = forward

    def remove(self) -> None:
        """Restore the MLPs' own forward."""
        for module, under in zip(self._modules, self._under, strict=True):
            if under is None:
                del module.forward
            else:  # a fused form, which was there first
                module.forward = under

    def assert_effect(self, forwards: int) -> None:
        """Every MLP ran in every forward, and never over more tokens than a chunk's.

        Raises:
            EffectError: names those that did not.
        """
        idle = [n for n in self.names if self.runs[n] < forwards or not 0 < self.widest[n] <= self.chunk]
        if idle:
            raise EffectError(
                f"MLPs of {len(self.names)} blocks in chunks of {self.chunk} tokens",
                f"{idle[0]} ran {self.runs[idle[0]]} of {forwards} times, over {self.widest[idle[0]]} tokens at once",
                "its insides were as wide as the sequence",
            )


def mlp_names(model: nn.Module, structure: Structure) -> Iterable[str]:
    """The MLP of every block: the module around its `up` layer.

    Raises:
        ConflictError: there is none, or there are several (experts, which share out the tokens).
    """
    found = structure.roles.get("up", ()) or structure.roles.get("gate_up", ())
    parents = {name.rpartition(".")[0] for name in found}
    if len(parents) != 1 or "" in parents:
        raise ConflictError(
            "exact.mlp_chunk",
            f"{len(parents) if '' not in parents else 'no'} MLP modules in a block of a '{structure.family}' model",
            "its layers are the block's own, or the block's tokens go to experts: neither is one token-wise module",
            "exact.mlp_chunk=null; exact.recompute=all keeps as little between blocks",
        )
    (parent,) = parents
    return [f"{block}.{parent}" for block in structure.blocks]


def refuse_mixing(name: str, module: nn.Module, width: int) -> None:
    """Run three tokens together and each alone: a module of tokens gives the same.

    Raises:
        ConflictError: it does not. Simulated weights have no numbers, and nothing is run.
    """
    weight = next(module.parameters(), None)
    if weight is None or is_simulated(weight):
        return
    kind = weight.dtype
    with torch.no_grad():
        x = torch.arange(3 * width, dtype=torch.float32, device=weight.device).sin().view(1, 3, width).to(kind)
        together: Any = module(x)
        alone = [module(x[:, i : i + 1]) for i in range(3)]
        if not isinstance(together, Tensor) or together.shape[:2] != x.shape[:2]:
            _mixes(name, f"a {type(together).__name__} for three tokens")
        gap = (torch.cat(alone, 1) - together).abs().max() / together.abs().max().clamp_min(1e-30)
    apart = read(gap, expect=0.0)
    if not apart < ROUNDING.get(kind, 5e-2):
        _mixes(name, f"three tokens together and each alone differ by {apart:.1%}")


def _mixes(name: str, found: str) -> None:
    raise ConflictError(
        f"exact.mlp_chunk: {name} a few tokens at a time",
        found,
        "it mixes tokens, so a chunk would not see what it needs",
        "exact.mlp_chunk=null; exact.recompute=all keeps as little between blocks",
    )


def has_mlp(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config has MLPs that run alone, as far as its config says: no experts, not OPT, whose
    layers are the block's own."""
    experts = any(int(config.get(key) or 0) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return not experts and config.get("model_type") != "opt"
