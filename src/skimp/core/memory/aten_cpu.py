"""What ATen's own CPU operators allocate inside one call, beyond their outputs.

Each rule is arithmetic on shapes and the thread count, and is held against the c10 allocator's events by
`tests/core/test_aten_cpu.py`. Operators not named here allocate exactly their outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.core.workspace import declare_workspace

#: Elementwise operators that turn a Python number into a 0-d tensor first.
_BINARY = (
    "add",
    "add_",
    "sub",
    "sub_",
    "mul",
    "mul_",
    "div",
    "div_",
    "rsub",
    "maximum",
    "minimum",
    "remainder",
    "fmod",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
)

#: oneDNN multiplies half dtypes from 16 x 16 x 16 multiplications on.
SMALL_PRODUCT = 16**3

#: Half dtypes that it multiplies on this CPU at all: without AVX-512 (or AVX-NE-CONVERT) ATen's own loops do, which
#: take nothing beside the output. Asked once, here: a question without tensors would be seen by a tracker.
ONEDNN_HALVES = frozenset(
    dtype
    for dtype, supported in (
        (torch.bfloat16, torch.ops.mkldnn._is_mkldnn_bf16_supported),
        (torch.float16, torch.ops.mkldnn._is_mkldnn_fp16_supported),
    )
    if supported()
)


def _scalar(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A number becomes a 0-d float64 or int64 of 8 bytes, and one more in the computing dtype if that differs."""
    if len(args) < 2 or not isinstance(args[0], Tensor):
        return 0
    if isinstance(args[1], Tensor):
        return args[0].itemsize if args[1].dim() == 0 and args[1].dtype != args[0].dtype else 0
    return _number(args[0].dtype, args[1]) - (8 if _is_saved() else 0)


def _is_saved() -> bool:
    """In the backward of a product or a quotient the number's tensor is the one its forward kept."""
    if torch.is_grad_enabled():
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name() in ("MulBackward0", "DivBackward0")


def _number(dtype: torch.dtype, number: Any) -> int:
    own = torch.int64 if isinstance(number, int) else torch.float64
    return 8 if dtype == own else 8 + dtype.itemsize


def _flash_split(seq: int) -> int:
    """Rows of queries one thread works on: 256 from 768 on, 64 from 192 on, else 32."""
    return min(seq, 256 if seq >= 768 else 64 if seq >= 192 else 32)


def _flash(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Per thread: a block of scores, its running maximum and sum, and a block of outputs, in float32 at least."""
    query, key = args[0], args[1]
    rows, keys, dim = _flash_split(query.shape[2]), min(512, key.shape[2]), query.shape[3]
    wide = 8 if query.dtype == torch.float64 else 4
    size = wide * (rows * keys + 2 * rows + rows * dim)
    if query.dtype in (torch.bfloat16, torch.float16):
        size += 2 * rows * keys
    return torch.get_num_threads() * size


def _flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Per thread two blocks of scores, and one row sum a query row.

    Half dtypes also keep the blocks narrow, and their products collect in float32. A gradient that does not lie as
    (rows, seq, heads, dim) is copied.
    """
    grad, query, key = args[0], args[1], args[2]
    rows, keys = _flash_split(query.shape[2]), min(512, key.shape[2])
    wide = 8 if query.dtype == torch.float64 else 4
    threads = torch.get_num_threads()
    size = threads * 2 * wide * rows * keys + wide * rows
    if not grad.transpose(1, 2).is_contiguous():
        size += grad.numel() * grad.itemsize
    if query.dtype in (torch.bfloat16, torch.float16):
        size += threads * 2 * 2 * rows * keys
        if query.dtype in ONEDNN_HALVES and rows * keys * query.shape[3] > SMALL_PRODUCT:
            share = -(-keys * query.shape[3] // threads)
            size += 4 * threads * (-(-share // 64) * 64) + 132
    return size


def _layer_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Partial sums of the weight's and the bias's gradient, one row per thread each; a strided gradient is copied."""
    width = 1
    for n in args[2]:
        width *= n
    wanted = args[7][1] or args[7][2]
    copied = 0 if args[0].is_contiguous() else args[0].nbytes
    return copied + (torch.get_num_threads() * 2 * width * args[1].dtype.itemsize if wanted else 0)


def _mean(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The divisor, an integer, as a 0-d tensor; half dtypes are widened to float32 first, output included."""
    x = args[0]
    dtype = kwargs.get("dtype") or x.dtype
    if dtype in (torch.bfloat16, torch.float16):
        return 4 * x.numel() + 4 * (x.numel() // max(1, x.shape[-1]))
    return _number(dtype, 1)


def _sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A full sum of at least 32,768 numbers is done by all threads, in two passes, one partial sum each."""
    x = args[0]
    threads = torch.get_num_threads()
    full = len(args) < 2 and x.numel() >= 32768 and threads > 1
    return threads * (kwargs.get("dtype") or x.dtype).itemsize if full else 0


def _strided(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A strided gradient is made contiguous first."""
    return 0 if args[0].is_contiguous() else args[0].nbytes


def _product(left: int) -> Any:
    """What a matrix product takes beside its output.

    An operand whose numbers lie next to each other neither along rows nor along columns is copied. oneDNN's bfloat16
    without matrix instructions collects float32 sums first, 4 M N bytes shared by the threads, each share rounded up
    to 64 numbers, and 128 bytes (132 where the product is scaled); of a batch each thread has one product at a time.
    CPUs with bfloat16 instructions need less.
    """

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        a, b = args[left], args[left + 1]
        size = sum(t.numel() * t.itemsize for t in (a, b) if 1 not in t.stride()[-2:] and t.numel() > 1)
        if a.dtype in ONEDNN_HALVES and a.numel() * b.shape[-1] > SMALL_PRODUCT:
            batch, threads = (a.shape[0] if a.dim() == 3 else 1), torch.get_num_threads()
            sums = a.shape[-2] * b.shape[-1]
            shares, share = (threads, -(-sums // threads)) if batch == 1 else (min(threads, batch), sums)
            size += 4 * shares * (-(-share // 64) * 64) + (128 if kwargs.get("alpha", 1) == 1 else 132)
        return size

    return rule


def _wider_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A norm in a wider dtype copies its input into it."""
    dtype = kwargs.get("dtype")
    return 0 if dtype is None or dtype == args[0].dtype else args[0].numel() * dtype.itemsize


def _eigh(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """LAPACK's work of ?syevd with vectors, 1 + 6 n + 2 n² numbers and 3 + 5 n integers, and what is asked for them."""
    n, size = args[0].shape[-1], args[0].itemsize
    numbers, integers = (1 + 6 * n + 2 * n * n, 3 + 5 * n) if n > 1 else (1, 1)
    return size * numbers + 4 * integers + 4 + size


def _cholesky_solve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """A copy of the factor, and how the solve went."""
    return args[1].numel() * args[1].itemsize + 6


for _name in _BINARY:
    declare_workspace(f"aten::{_name}")(_scalar)
declare_workspace("aten::mean")(_mean)
declare_workspace("aten::_scaled_dot_product_flash_attention_for_cpu")(_flash)
declare_workspace("aten::_scaled_dot_product_flash_attention_for_cpu_backward")(_flash_backward)
declare_workspace("aten::native_layer_norm_backward")(_layer_norm_backward)
declare_workspace("aten::sum")(_sum)
declare_workspace("aten::embedding_dense_backward")(_strided)
declare_workspace("aten::linalg_vector_norm")(_wider_norm)
declare_workspace("aten::_linalg_eigh")(_eigh)
declare_workspace("aten::_linalg_check_errors")(lambda args, kwargs: 2)
declare_workspace("aten::cholesky_solve")(_cholesky_solve)
declare_workspace("aten::sort")(lambda args, kwargs: 8 * args[0].numel())
declare_workspace("aten::mm")(_product(0))
declare_workspace("aten::bmm")(_product(0))
declare_workspace("aten::addmm")(_product(1))
declare_workspace("aten::addmm_")(_product(1))
