"""Which matrices the projected family projects, at which rank, and the state each parameter gets."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.coded_trained import codes_of
from skimp.core.errors import SkimpError
from skimp.core.sharded import largest_part
from skimp.optim.base import UpdateRule
from skimp.optim.options import check_dtype
from skimp.optim.plain import plain_spec
from skimp.optim.role import TABLES
from skimp.optim.stages import Stages
from skimp.optim.state import Spec, state_nbytes

#: Where groups have no roles: parts of names of tables of tokens and positions, and of output heads.
TABLE_NAMES = ("embed", "wte", "wpe", "lm_head", "score", "classifier")


class Chosen(UpdateRule):
    """A rule whose groups carry a "rank" and which has `stages`: what that means for every parameter."""

    locality: ClassVar[Any] = "matrix"
    by_role: ClassVar[bool] = True
    stages: Stages

    # ---- which parameters

    def rank_of(self, p: Tensor) -> int | None:
        """The rank of this parameter's basis; None where it stays whole."""
        rank = self.asked_rank(p)
        if rank is None or rank > self.sides(p)[0]:
            return None
        if not self.stages.projector.saves:
            return rank
        return rank if self._bytes(self._spec(p, rank)) < self._unprojected(p) else None

    def asked_rank(self, p: Tensor) -> int | None:
        """The rank asked for a parameter that is a matrix between hidden states; None for every other."""
        return self._directions(p, self.group_of(p)["rank"]) if self.chosen(p) else None

    def chosen(self, p: Tensor) -> bool:
        """Whether a parameter is a matrix between hidden states."""
        group = self.group_of(p)
        if p.ndim != 2:
            return False
        if "role" in group:
            return group["role"] not in (*TABLES, "vector")
        name = self.name_of(p).lower()
        return not any(part in name for part in TABLE_NAMES)

    def turned(self, p: Tensor) -> bool:
        """Whether a matrix's columns are the side that is projected: it is seen transposed then."""
        return p.shape[0] >= p.shape[1]

    def sides(self, p: Tensor) -> tuple[int, int]:
        """(a, b): the length of the projected side of a matrix, and of the other one."""
        return (p.shape[1], p.shape[0]) if self.turned(p) else (p.shape[0], p.shape[1])

    def _directions(self, p: Tensor, asked: float) -> int:
        """The rank that a group's "rank" means for one of its matrices."""
        return int(asked) or max(1, self.sides(p)[0] // 4)

    def _check_some(self) -> None:
        matrices = [p for p in self.parameters() if self.asked_rank(p) is not None]
        if any(self.rank_of(p) is not None for p in matrices):
            return
        if not matrices:
            shapes = sorted({tuple(p.shape) for p in self.parameters()}, key=str)[:5]
            raise SkimpError(
                f"{self.rule}: a matrix between hidden states to project",
                f"none among {len(self.parameters())} parameters, of shapes {', '.join(map(str, shapes))}",
                "one dimension has no subspace to find; a sharding that flattens parameters loses their shape",
                ("adamw8bit: 2.03 bytes of state per parameter", "FSDP2 or DTensor, which keep shapes"),
            )
        p = max(matrices, key=lambda q: q.numel())
        rank, most = self.asked_rank(p) or 1, self.break_even(p)
        if rank > self.sides(p)[0]:
            found, why = f"the largest matrix is {tuple(p.shape)}", f"it has {self.sides(p)[0]} directions"
        else:
            low, whole = self._bytes(self._spec(p, rank)), self._unprojected(p)
            found = f"{low:,} bytes of state for {tuple(p.shape)}, {whole:,} unprojected"
            why = f"it saves nothing from rank {most + 1} on"
        ways = [f"rank {most} at most"] if most else []
        raise SkimpError(f"{self.rule}: rank {rank}", found, why, [*ways, "adamw8bit: 2.03 bytes per parameter"])

    def break_even(self, p: Tensor) -> int:
        """The largest rank at which this matrix's state is smaller than unprojected; 0 where there is none."""
        whole, low, high = self._unprojected(p), 0, self.sides(p)[0]
        while low < high:
            middle = (low + high + 1) // 2
            small = self._bytes(self._spec(p, middle)) < whole
            low, high = (middle, high) if small else (low, middle - 1)
        return low

    # ---- state

    def _spec(self, p: Tensor, rank: int) -> Spec:
        stages, work = self.stages, torch.promote_types(p.dtype, torch.float32)
        a, b = self.sides(p)
        small = stages.projector.small(a, b, rank)
        spec = dict(stages.projector.spec(a, b, rank, work)) | stages.inner.state_spec(small, work)
        for transform in stages.transforms:
            spec |= transform.spec(small, work)
        spec |= {} if stages.post is None else stages.post.spec(a, b)
        spec |= {"error": ((a, b), work)} if stages.feedback else {}
        return spec | ({"alike": ((5,), torch.float32)} if stages.lazy else {})

    def _whole(self, p: Tensor) -> Spec:
        return plain_spec(largest_part(p), p.dtype, p.numel(), self.stages.states)

    def _unprojected(self, p: Tensor) -> int:
        """Bytes of the whole parameter's state if it stayed whole, however it is sharded."""
        return self._bytes(plain_spec(p.shape, p.dtype, p.numel(), self.stages.states))

    @staticmethod
    def _bytes(spec: Spec) -> int:
        return sum(state_nbytes(shape, kind) for shape, kind in spec.values())

    def part_spec(self, p: Tensor) -> Spec:
        rank = self.rank_of(p)
        return self._whole(p) if rank is None else self._spec(p, rank)

    def numbers_of(self, p: Tensor) -> tuple[str, ...]:
        if self.rank_of(p) is None:
            return ("step",)
        own = [*self.stages.projector.numbers, *(key for t in self.stages.transforms for key in t.numbers)]
        return ("step", "since", "refreshed", *own, *(("gap", "seen") if self.stages.lazy else ()))

    def locality_of(self, p: Tensor) -> str:
        return "element" if self.rank_of(p) is None and codes_of(p) is None else "matrix"

    def moves_all(self, p: Tensor) -> bool:
        """Whether an update moves every number of `p` that has a gradient, and not a chosen few."""
        few = getattr(self.stages.projector, "few", False) and self.stages.post is None
        return not few or self.rank_of(p) is None

    def rule_for(self, p: Tensor) -> str:
        rank, asked = self.rank_of(p), self.asked_rank(p)
        if rank is not None:
            return f"{self.rule} (rank {rank})"
        kind = {"fp32": "adamw", "bf16": "adamw (bf16 states)", "int8": "adamw8bit"}[self.stages.states]
        return kind if asked is None else f"{kind} (rank {asked} saves nothing here)"

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)
