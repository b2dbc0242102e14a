"""How many outliers a block has: the weights of OwLore's draw.

For a linear layer with weight W (m x n) on inputs X, entry (i, j) matters as A_ij = |W_ij| · ||X_j||, the norm over
all tokens. A block's score is the share of the entries of all its linear layers, in percent, that lie above
`threshold` times their common mean. It does not change when all weights of the block, or all its inputs, are scaled
by one factor.

Yin et al., "Outlier Weighed Layerwise Sparsity (OWL)", 2023, arXiv 2310.05175, section 3.2; used for sampling by
OwLore, 2024, arXiv 2405.18380, section 3.1, with threshold 13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.memory.tracker import scope
from skimp.core.read import read
from skimp.core.repeat import rounds

#: Entries of A that exist at once: 4 MB in float32.
SLICE = 1 << 20


@torch.no_grad()
def outlier_scores(
    model: nn.Module,
    blocks: Sequence[str],
    forward: Callable[[Any], Any],
    batches: Sequence[Any],
    threshold: float = 13.0,
) -> list[float]:
    """Percent of outliers of every block, from one forward pass over `batches` without gradients.

    Args:
        model: holds the blocks by name.
        blocks: names of the blocks.
        forward: runs the model on a batch; its answer is not read.
        batches: the calibration text; more of it makes the input norms less noisy.
        threshold: multiples of the mean from which an entry is an outlier.
    """
    linears = {name: _linears(model.get_submodule(name)) for name in blocks}
    squares: dict[nn.Module, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda m, args: _add(squares, m, args[0]))
        for modules in linears.values()
        for module in modules
    ]
    try:
        with scope("workspace", "outliers"):
            for batch in batches:
                forward(batch)
    finally:
        for hook in hooks:
            hook.remove()
    with scope("workspace", "outliers"):
        return [
            percent_above([(_weight(m), squares[m].sqrt()) for m in modules if m in squares], threshold)
            for modules in linears.values()
        ]


def percent_above(pairs: Sequence[tuple[Tensor, Tensor]], threshold: float) -> float:
    """100 x the share of entries |W_ij| · norm_j above `threshold` times their mean over all pairs.

    Args:
        pairs: weight (m, n) and input norms (n,) of each linear layer.
    """
    count = sum(weight.numel() for weight, _ in pairs)
    if not count:
        return 0.0
    device = pairs[0][0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for weight, norms in pairs:
        parts = _slices(weight)
        for part in (parts[i] for i in rounds(range(len(parts)))):
            total += (part.abs() * norms.to(part.dtype)).sum(dtype=torch.float64)
    limit, above = threshold * total / count, torch.zeros((), dtype=torch.int64, device=device)
    for weight, norms in pairs:
        parts = _slices(weight)
        for part in (parts[i] for i in rounds(range(len(parts)))):
            above += (part.abs() * norms.to(part.dtype) > limit).sum()
    return 100.0 * read(above, expect=1.0) / count


def _slices(weight: Tensor) -> list[Tensor]:
    return list(torch.split(weight, max(1, SLICE // max(1, weight.shape[1]))))


def _linears(block: nn.Module) -> list[nn.Module]:
    return [m for m in block.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]


def _weight(module: nn.Module) -> Tensor:
    """(outputs, inputs); GPT-2's Conv1D stores it the other way round."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(module, nn.Linear) else weight.t()


def _add(squares: dict[nn.Module, Tensor], module: nn.Module, x: Tensor) -> None:
    """Sum of squares of every input feature, float32."""
    flat = x.reshape(-1, x.shape[-1])
    found = torch.linalg.vector_norm(flat, dim=0, dtype=torch.float32).square_()
    if module in squares:
        squares[module] += found
    else:
        squares[module] = found
