"""What every launch shares: pieces of a row, and inputs that lie as the kernels read them."""

from __future__ import annotations

from torch import Tensor

#: Columns in registers at once: 4,096 float32 numbers are 16 KB, 32 a thread of 128.
MOST = 4096


def piece(width: int) -> int:
    """Columns a program takes at a time: the width's next power of two, at most `MOST`."""
    return min(MOST, 1 << max(0, (width - 1).bit_length()))


def rows_of(x: Tensor) -> tuple[Tensor, int, int]:
    """(x as dense rows, rows, width)."""
    dense = x.contiguous()
    width = dense.shape[-1]
    return dense, dense.numel() // width, width
