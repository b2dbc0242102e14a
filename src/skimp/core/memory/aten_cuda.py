"""What ATen's CUDA operators allocate inside one call, beyond their outputs: stated, since no host can measure it.

From the sources of PyTorch 2.10 to 2.13. Each is an upper bound where the kernel chooses by values or by the number of
multiprocessors. Not stated: the scratch of reductions, sorts and scans beyond those named, below 1 MB each, from the
small pool. Matrix products take their workspace once a handle (`core.memory.trace`).
`benchmarks/gpu_truth.py` holds whole steps against a card.
"""

from __future__ import annotations

from typing import Any

from skimp.core.workspace import workspace_bytes

#: Rows one thread block sums in the backward of an embedding; up to SIMPLE indices it takes no scratch.
ROWS_A_BLOCK, SIMPLE = 10, 3072
#: Rows by which every document's queries are padded in flash attention's backward.
PADDED = 128


def workspace(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that operator `name` ("aten::mm") allocates and frees inside the call on a CUDA device.

    Operators of skimp's own state theirs themselves, by `core.workspace`.
    """
    rule = RULES.get(name)
    if rule is not None:
        return int(rule(args, kwargs))
    return 0 if name.startswith("aten::") else workspace_bytes(name, args, kwargs)


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The queries' gradient in float32 and a sum for each row, both padded by document; with grouped queries also keys'
    and values' gradients for every head of queries, before they are added up."""
    query, key, offsets = args[1], args[2], args[6]
    tokens, heads, dim = query.shape
    rows = tokens + PADDED * (offsets.shape[0] - 1)
    wide = -(-dim // 32) * 32 if dim <= 128 else 192 if dim <= 192 else 256
    size = 4 * rows * heads * (wide + 1)
    if key.shape[1] != heads:
        size += 2 * key.shape[0] * heads * dim * key.itemsize
    return int(size)


def _embedding_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Indices sorted with their places (four copies, and two of the sort's own), segments, and float32 partial sums.

    Segments are as many as there are different tokens; every token may differ.
    """
    grad, indices, rows = args[0], args[1], args[2]
    count = indices.numel()
    if count <= SIMPLE:
        return 0
    segments = min(count, rows)
    partial = count // ROWS_A_BLOCK + segments
    return int(6 * 8 * count + 8 * (2 * segments + count + partial) + 4 * partial * grad.shape[-1])


RULES = {
    "aten::_flash_attention_backward": _flash_backward,
    "aten::embedding_dense_backward": _embedding_backward,
}
