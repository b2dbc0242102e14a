"""Which part a parameter plays, for rules that treat hidden matrices, embeddings, head and vectors unlike.

The roles come from `skimp.core.structure`, so they do not hang on a name being spelled right: a learned position
table is an embedding, GPT-2's fused projections are known to store outputs as columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from skimp.core.coded_linear import CodedLinear
from skimp.core.coded_trained import stand_ins
from skimp.core.errors import ModelError
from skimp.core.structure import Structure, read_structure

#: Roles of whole tables of tokens or positions; hidden matrices are every other role but "vector".
TABLES = ("embedding", "head")


@dataclass(frozen=True)
class Role:
    """What a parameter is.

    Attributes:
        kind: "embedding", "head", "vector" (fewer than two dimensions), a role of the block ("q", "k", "v", "qkv",
            "o", "gate", "up", "gate_up", "down", "c_proj"), or "matrix" for any other.
        columns: its outputs are columns, as in GPT-2's layers; rows elsewhere.
        head_dim: rows (or columns) of one attention head; 0 where heads mean nothing.
    """

    kind: str
    columns: bool = False
    head_dim: int = 0

    @property
    def hidden(self) -> bool:
        """A matrix between hidden states: neither a table nor a vector."""
        return self.kind not in (*TABLES, "vector")


def roles(model: nn.Module, structure: Structure | None = None) -> dict[str, Role]:
    """The role of every parameter by name, tied ones once, and of every weight that trains in codes.

    Args:
        structure: read from the model where None. A model skimp cannot read is judged by its modules: an
            `nn.Embedding` is an embedding, and a layer with as many outputs as an embedding has rows is the head.
    """
    if structure is None:
        try:
            structure = read_structure(model)
        except ModelError:
            structure = None
    named = chain(model.named_parameters(), stand_ins(model))
    return {name: _role(model, structure, name, p) for name, p in named}


def _role(model: nn.Module, structure: Structure | None, name: str, p: Any) -> Role:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner) if owner else model
    columns = type(module).__name__ == "Conv1D"
    if p.ndim < 2:
        return Role("vector")
    if isinstance(module, nn.Embedding) or (structure is not None and owner == structure.embedding):
        return Role("embedding")
    if structure is None:
        tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        return Role(
            "head" if isinstance(module, (nn.Linear, CodedLinear)) and module.out_features in tables else "matrix",
            columns,
        )
    if owner == structure.head:
        return Role("head")
    index = structure.block_of(owner)
    if index is not None and leaf == "weight":
        inside = owner[len(structure.blocks[index]) + 1 :]
        for kind, names in structure.roles.items():
            if inside in names and kind != "norm":
                return Role(kind, columns, structure.head_dim if kind in ("q", "k", "v") else 0)
    return Role("matrix", columns)
