"""Adam-mini: one second moment for each block of the Hessian instead of one a number: half of Adam's states.

Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More", 2024, arXiv 2406.16793, section 2.3, algorithm 2. In a
transformer the Hessian is near block-diagonal, and the blocks follow the structure:

    queries, keys                     a block is a head: head_dim rows (of a key head where heads share keys)
    values, outputs, MLP              a block is an output neuron, a row
    embedding, head                   a block is a token, a row
    norm gains                        the whole vector
    biases                            each number for itself: ordinary Adam

    m ← β₁·m + (1−β₁)·g;  v_b ← β₂·v_b + (1−β₂)·mean of g² over block b;  the step is AdamW's, decay first.

Layers that store outputs as columns (GPT-2) have columns for blocks. A fused query-key-value layer takes one block a
neuron: finer than heads, as it holds values too. With blocks of one number this is AdamW.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.codecs.base import count
from skimp.core.errors import SkimpError
from skimp.core.noise import key64
from skimp.core.sharded import Part, is_sharded, largest_part
from skimp.core.workspace import declare_workspace
from skimp.optim.base import UpdateRule
from skimp.optim.elementwise import wide_dtype
from skimp.optim.factored import average_chunk_
from skimp.optim.options import check_dtype, check_options, lr_of
from skimp.optim.rowwise import Rows
from skimp.optim.state import Spec


class AdamMini(UpdateRule):
    """Adam-mini. State: m shaped like the parameter, v with one number a block.

    Args:
        params: groups with roles: `role_groups(model.named_parameters(), weight_decay, roles(model))`.
        lr, betas, eps, weight_decay: as in AdamW.
        vectors: "whole" as in the paper; "element" keeps a moment for each number of a norm gain too, which shards.

    Raises:
        SkimpError: an option out of range, groups without roles, a shard that cuts a block.
    """

    rule: ClassVar[str] = "adam-mini"
    locality = "row"
    by_role = True

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        vectors: Literal["whole", "element"] = "whole",
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        if vectors not in ("whole", "element"):
            raise SkimpError(f"{self.rule}: vectors 'whole' or 'element'", repr(vectors))
        self.vectors = vectors
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)
        check_role(self.rule, name, self.group_of(p))
        rows, block = p.shape[0] if p.ndim else 1, self.block_of(p)
        if p.numel() % block:
            raise SkimpError(
                f"{self.rule}: heads of '{name}'",
                f"{rows} rows for heads of {self.group_of(p)['head_dim']}",
                "a block is a whole head",
                "give the group the right head_dim, or role 'matrix': a block a row",
            )

    def columns_of(self, p: Tensor) -> bool:
        """Whether the blocks of `p` are its columns."""
        return bool(self.group_of(p)["columns"]) and p.ndim == 2

    def block_of(self, p: Tensor) -> int:
        """Numbers of a block; blocks are neighbours in memory unless they are columns."""
        group = self.group_of(p)
        if p.ndim < 2:
            whole = self.vectors == "whole" and not self.name_of(p).endswith("bias")
            return max(1, p.numel()) if whole else 1
        if self.columns_of(p):
            return p.shape[0]
        row = count(tuple(p.shape)[1:])
        return max(1, row * group["head_dim"] if group["role"] in ("q", "k") and group["head_dim"] else row)

    def locality_of(self, p: Tensor) -> str:
        block = self.block_of(p)
        if block == 1:
            return "element"
        part = largest_part(p)
        cut = is_sharded(p) and (part[1:] != tuple(p.shape)[1:] or count(part) % block or self.columns_of(p))
        return "matrix" if cut or p.ndim < 2 else "row"

    def part_spec(self, p: Tensor) -> Spec:
        part, wide = largest_part(p), wide_dtype(p.dtype)
        blocks = p.shape[1] if self.columns_of(p) else -(-count(part) // self.block_of(p))
        return {"m": (part, wide), "v": (part if self.block_of(p) == 1 else (blocks,), wide)}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        check_dtype(self.rule, part.name, grad)
        blocks = state["v"].numel()
        columns = bool(group["columns"]) and p.ndim == 2
        block = 0 if columns else self._block(p, group, part, blocks)
        beta1, beta2 = group["betas"]
        step, lr = state["step"], lr_of(group)
        scalars = [beta1, beta2, math.sqrt(1.0 - beta2**step), group["eps"], lr / (1.0 - beta1**step)]
        scalars.append(1.0 - lr * group["weight_decay"])
        adam_mini(
            p, grad, state["m"], state["v"], block, scalars, key64(group["seed"], part.address), step, part.offset
        )

    def _block(self, p: Tensor, group: dict[str, Any], part: Part, blocks: int) -> int:
        if p.ndim < 2:
            return 1 if blocks == part.whole or blocks == p.numel() else p.numel()
        row = count(tuple(p.shape)[1:])
        return row * group["head_dim"] if group["role"] in ("q", "k") and group["head_dim"] else row


def check_role(rule: str, name: str, group: dict[str, Any]) -> None:
    """A rule that treats roles unlike must be told them: a guess by shape would take an embedding for a matrix.

    Raises:
        SkimpError: the parameter's group has no role.
    """
    if "role" not in group:
        raise SkimpError(
            f"{rule} on parameter '{name}'",
            "a group without a role",
            "it treats hidden matrices, embeddings, head and vectors unlike, and shapes do not tell them apart",
            "role_groups(model.named_parameters(), weight_decay, roles(model)), both from skimp.optim",
        )


@torch.library.custom_op(
    "skimp::adam_mini",
    mutates_args=("p", "m", "v"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, int block, float[] scalars, int key, int step, "
    "int offset=0) -> ()",
)
def adam_mini(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    block: int,
    scalars: list[float],
    key: int,
    step: int,
    offset: int = 0,
) -> None:
    """One step in place. `block`: numbers of a block, neighbours in memory; 0 where blocks are the columns."""
    if p.numel() == 0:
        return
    beta1, beta2, root_bias2, eps, step_size, decay = scalars
    shape = _shape(p, block)
    work = Rows(p.view(shape), g.view(shape), key, offset)
    moments, blocks = m.view(shape), v.view(-1)
    work.column.zero_()
    for here in work.chunks():
        grad, u, _, _ = work.read(here)
        torch.mul(grad, grad, out=u)
        if block:
            average_chunk_(work, here, u, blocks, beta2)
        else:
            work.column.add_(torch.sum(u, dim=0, out=work.other))
    if not block:
        blocks.mul_(beta2).add_(work.column, alpha=(1.0 - beta2) / work.rows)
    for here in work.chunks():
        u, _, _, row = work.read(here)
        moments[here].mul_(beta1).add_(u, alpha=1.0 - beta1)
        root = torch.sqrt(blocks[here], out=row) if block else torch.sqrt(blocks, out=work.other)
        root.div_(root_bias2).add_(eps)
        u.copy_(moments[here]).mul_(step_size).div_(root.unsqueeze(1) if block else root)
        work.write(here, u, decay, step)


def _shape(p: Tensor, block: int) -> tuple[int, int]:
    return (p.numel() // block, block) if block else (p.shape[0], p.shape[1])


@adam_mini.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::adam_mini")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    p, block, offset = args[0], args[4], args[8] if len(args) > 8 else 0
    return Rows.nbytes(p, _shape(p, block), offset) if p.numel() else 0
