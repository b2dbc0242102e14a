"""Block-sparse attention: the pattern's laws, equality with masked attention in float64, caches that let go."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.native.sparse import SPARSE
from skimp.kernels.sparse_apply import over_a_past
from skimp.kernels.sparse_attention import sparse_attention, sparse_attention_reference, visited

native = pytest.mark.skipif(not SPARSE.available(), reason="native kernels not built")
CLOSE = 2e-6


def drawn(heads: int, kv: int, seq: int, dim: int, rows: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, h, seq, dim, generator=generator) for h in (heads, kv, kv)]


def gradients(call: object, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = call(*leaves)  # type: ignore[operator]
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def compare(tensors: list[Tensor], pattern: BlockPattern, scale: float | None = None) -> None:
    found = gradients(lambda *t: sparse_attention(*t, pattern, scale), tensors)
    wanted = gradients(lambda *t: sparse_attention_reference(*t, pattern, scale), [t.double() for t in tensors])
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() < CLOSE * other.abs().max()


# ---------------------------------------------------------------------- 1: masked attention, values and gradients
@native
@pytest.mark.parametrize(
    ("heads", "kv", "seq", "dim", "pattern"),
    [
        (4, 2, 150, 16, BlockPattern(2, 16, 2, 3)),  # grouped, a short last block
        (3, 3, 97, 64, BlockPattern(3, 32, 1, 4)),  # patterns fewer than the stride
        (4, 1, 64, 12, BlockPattern(1, 16, 2, None)),  # one key head, a head size that is no multiple of 16
        (4, 4, 130, 40, BlockPattern(4, 48, 1, 4, offset=1, dense_heads=1)),
        (2, 2, 5, 16, BlockPattern(2, 16, 3, 2)),  # shorter than a block
    ],
)
def test_equals_attention_under_the_expanded_mask(
    heads: int, kv: int, seq: int, dim: int, pattern: BlockPattern
) -> None:
    compare(drawn(heads, kv, seq, dim), pattern)
    compare(drawn(heads, kv, seq, dim, rows=1), pattern, 0.3)


@native
def test_tensors_laid_out_as_a_model_has_them() -> None:
    """(rows, seq, heads, dim) in memory, as projections leave them; also the upstream gradient."""
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in drawn(4, 2, 70, 16)]
    pattern = BlockPattern(2, 16, 1, 2)
    compare(tensors, pattern)
    plain = gradients(lambda *t: sparse_attention(*t, pattern), [t.contiguous() for t in tensors])
    laid = gradients(lambda *t: sparse_attention(*t, pattern), tensors)
    assert all(torch.equal(a, b) for a, b in zip(plain, laid, strict=True))


@native
def test_halves_are_widened_and_rounded_once() -> None:
    pattern = BlockPattern(2, 16, 1, 2)
    tensors = [t.bfloat16() for t in drawn(4, 2, 70, 16)]
    found = gradients(lambda *t: sparse_attention(*t, pattern), tensors)
    wanted = gradients(lambda *t: sparse_attention_reference(*t, pattern), [t.double() for t in tensors])
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).abs().max() < 2.0**-8 * other.abs().max()


@native
def test_threads_do_not_change_a_bit() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            pattern = BlockPattern(2, 16, 2, 2)
            found.append(gradients(lambda *t, p=pattern: sparse_attention(*t, p), drawn(4, 2, 150, 16)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ---------------------------------------------------------------------- 2: the ends of the range are known attentions
@native
@pytest.mark.parametrize(
    "pattern", [BlockPattern(2, 16, 1, 1), BlockPattern(2, 16, 9, 8), BlockPattern(2, 16, 1, 4, 0, 2)]
)
def test_stride_one_or_a_window_of_everything_is_plain_causal_attention(pattern: BlockPattern) -> None:
    tensors = drawn(4, 2, 90, 16)
    found = gradients(lambda *t: sparse_attention(*t, pattern), tensors)
    wanted = gradients(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [t.double() for t in tensors],
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() < CLOSE * other.abs().max()


def test_without_a_stride_it_is_a_window_and_a_huge_stride_is_not() -> None:
    window, huge = BlockPattern(2, 16, 2, None), BlockPattern(2, 16, 2, 10**6)
    assert all(window.allowed(g, i, j) == (0 <= i - j < 2) for g, i, j in product(range(2), range(9), range(9)))
    assert huge.allowed(0, 8, 0)  # block 0 stays visible to head 0
    assert not window.allowed(0, 8, 0)


# ---------------------------------------------------------------------- 3: coverage
@pytest.mark.parametrize(("heads", "stride"), [(8, 8), (8, 5), (3, 3), (16, 8)])
def test_with_a_head_for_every_residue_the_union_is_the_whole_context(heads: int, stride: int) -> None:
    pattern = BlockPattern(heads, 16, 2, stride)
    assert pattern.uncovered() == ()
    pattern.check_coverage()
    for i, j in product(range(40), range(40)):
        assert any(pattern.allowed(g, i, j) for g in range(heads)) == (j <= i)


@pytest.mark.parametrize(("heads", "bare"), [(4, (1, 3, 5, 7)), (5, (1, 2, 3))])
def test_with_fewer_heads_the_bare_residues_are_named(heads: int, bare: tuple[int, ...]) -> None:
    """Grouped keys: 4 or 5 patterns cannot cover a stride of 8, however many query heads read them."""
    pattern = BlockPattern(heads, 16, 2, 8)
    assert pattern.uncovered() == bare
    for i, j in product(range(40), range(40)):
        seen = any(pattern.allowed(g, i, j) for g in range(heads))
        assert seen == (j <= i and (i - j < 2 or j % 8 not in bare))
    with pytest.raises(SkimpError, match=rf"residue {bare[0]}, {bare[1]}[\s\S]*stride: {heads}"):
        pattern.check_coverage()
    BlockPattern(heads, 16, 2, 8, dense_heads=1).check_coverage()


def test_rows_are_the_predicate() -> None:
    for pattern in (
        BlockPattern(3, 16, 2, 4, offset=1),
        BlockPattern(4, 16, 3, 8, dense_heads=1),
        BlockPattern(2, 16, 1, None),
    ):
        for g, i in product(range(pattern.heads), range(30)):
            assert pattern.row(g, i) == [j for j in range(30) if pattern.allowed(g, i, j)]
        mask = pattern.mask(70)
        assert mask.shape == (pattern.heads, 70, 70)
        assert bool(mask[0, 69, 69])
        assert not bool(mask[0, 3, 4])


def test_sizes_that_cannot_be_are_refused() -> None:
    for wrong in ({"block": 24}, {"block": 256}, {"local": 0}, {"stride": 0}, {"dense_heads": 3}):
        with pytest.raises(SkimpError):
            BlockPattern(**{"heads": 2, **wrong})


def lets_go_for_good(allowed: Callable[[int, int], bool], blocks: int) -> bool:
    """Whether a block that is off stays off: what an evicting cache rests on."""
    return all(allowed(i, j) or not allowed(i + 1, j) for i in range(blocks - 1) for j in range(i))


# ---------------------------------------------------------------------- 4: once off, stays off
def test_blocks_counted_from_the_start_go_for_good_and_those_counted_from_the_query_do_not() -> None:
    pattern = BlockPattern(4, 16, 2, 4)
    for g in range(4):
        assert lets_go_for_good(lambda i, j, g=g: pattern.allowed(g, i, j), 30)
    assert not lets_go_for_good(lambda i, j: i - j < 2 or (i - j) % 4 == 0, 30)


# ---------------------------------------------------------------------- 5: queries over a past
@native
@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_last_queries_over_a_past_are_those_of_the_whole_sequence(count: int) -> None:
    pattern = BlockPattern(2, 16, 1, 2)
    q, k, v = drawn(4, 2, 75, 16)
    whole = sparse_attention(q, k, v, pattern)
    last = over_a_past(q[:, :, -count:], k, v, pattern, None)
    torch.testing.assert_close(last, whole[:, :, -count:], rtol=1e-5, atol=2e-6)


# ---------------------------------------------------------------------- cost: what is left out is not visited
def test_visited_keys_fall_with_the_stride() -> None:
    """At 16,384 tokens, blocks of 64, window 8, stride 8: less than a fifth of the dense."""
    dense = visited(9, 16384, [64, 1, 1, 0, 0])
    sparse = visited(9, 16384, [64, 8, 8, 0, 0])
    assert dense == pytest.approx((16384 + 64) / 2)
    assert sparse / dense == pytest.approx(0.179, abs=0.001)
