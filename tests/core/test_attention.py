"""Attention by declared facts, against the plain softmax in float64: values and every gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core import attention
from skimp.core.errors import ModelError

MODULE: Any = SimpleNamespace(is_causal=True)
WHOLE, PACKED = None, ((0, 5, 6, 13), (0, 13), (0, 1, 12, 13))


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Any,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The definition, with an S x S mask: (rows, seq, heads, dim)."""
    rows, heads, seq, dim = q.shape
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(seq).unsqueeze(1), torch.arange(seq).unsqueeze(0)
    seen = (j <= i).expand(rows, seq, seq).clone()
    if window is not None:
        seen &= j > i - window
    for row in range(rows):
        bounds = torch.tensor(documents[row][1:] if documents else (seq,))
        belongs = torch.searchsorted(bounds, torch.arange(seq), right=True)
        seen[row] &= belongs.unsqueeze(1) == belongs.unsqueeze(0)
    probs = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1)
    return (probs @ v).transpose(1, 2)


def inputs(heads: int, kv: int, seq: int = 13, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(heads * 100 + kv)
    shapes = [(3, heads, seq, 6), (3, kv, seq, 6), (3, kv, seq, 6)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 13, 40])
@pytest.mark.parametrize("documents", [WHOLE, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2), (3, 1)])
def test_equals_the_definition(heads: int, kv: int, documents: Any, window: int | None, softcap: float | None) -> None:
    q, k, v = inputs(heads, kv)
    upstream = torch.randn(3, 13, heads, 6, dtype=torch.float64)
    with attention.declared(documents):
        out, _ = attention.attend(MODULE, q, k, v, None, scaling=0.3, sliding_window=window, softcap=softcap)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    reference = plain(q, k, v, documents, 0.3, window, softcap)
    expected = torch.autograd.grad(reference, (q, k, v), upstream)
    torch.testing.assert_close(out, reference, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (150, None), (None, 5.0)])
def test_longer_than_a_block_of_queries(window: int | None, softcap: float | None) -> None:
    """Windowed attention works in blocks of 128 queries, flash in 32 or 64: 197 is several of each and a
    rest."""
    q, k, v = inputs(4, 2, seq=197)
    documents = ((0, 130, 197), (0, 197), (0, 64, 65, 197))
    with attention.declared(documents):
        out, _ = attention.attend(MODULE, q, k, v, None, sliding_window=window, softcap=softcap)
    reference = plain(q, k, v, documents, None, window, softcap)
    torch.testing.assert_close(out, reference, rtol=1e-11, atol=1e-12)
    upstream = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), upstream),
        torch.autograd.grad(reference, (q, k, v), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_documents_cannot_see_each_other() -> None:
    """To the bit: other tokens in the other documents change nothing."""
    q, k, v = inputs(4, 2, dtype=torch.float32)
    other = [t.detach().clone() for t in (q, k, v)]
    for t in other:
        t[:, :, 5:] = torch.randn_like(t[:, :, 5:])
    with attention.declared(((0, 5, 13),) * 3):
        one, _ = attention.attend(MODULE, q, k, v, None)
        two, _ = attention.attend(MODULE, *other, None)
    assert torch.equal(one[:, :5], two[:, :5])
    assert not torch.equal(one[:, 5:], two[:, 5:])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 5.0)])
def test_one_token_against_a_cache_equals_the_last_row_of_the_whole(window: int | None, softcap: float | None) -> None:
    q, k, v = (t.detach() for t in inputs(6, 2))
    whole, _ = attention.attend(MODULE, q, k, v, None, sliding_window=window, softcap=softcap)
    last, _ = attention.attend(MODULE, q[:, :, -1:], k, v, None, sliding_window=window, softcap=softcap)
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-12, atol=1e-12)


def test_autocast_computes_in_its_dtype_whatever_comes_in() -> None:
    """Rotary embeddings hand over float32 queries beside bfloat16 values."""
    q, k, v = (t.detach().float() for t in inputs(4, 2))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention.attend(MODULE, q, k, v.bfloat16(), None)
    assert out.dtype == torch.bfloat16
    exact = plain(q.double(), k.double(), v.double(), None, None, None, None)
    torch.testing.assert_close(out.double(), exact, rtol=0.0, atol=0.03)


def test_keeps_five_tensors_and_no_square() -> None:
    """Saved for backward: q, k, v, the output and the log-sum-exp, whatever the sequence."""
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        sizes.append(t.numel())
        return t

    q, k, v = inputs(4, 2, seq=64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        attention.attend(MODULE, q, k, v, None)
    assert sorted(sizes) == sorted([q.numel(), k.numel(), v.numel(), q.numel(), 3 * 4 * 64])


def test_same_shapes_and_strides_on_simulated_tensors() -> None:
    mode = FakeTensorMode()
    for documents, window in ((WHOLE, None), (PACKED, None), (PACKED, 4)):
        q, k, v = inputs(4, 2)
        with attention.declared(documents):
            real, _ = attention.attend(MODULE, q, k, v, None, sliding_window=window)
            with mode:
                fakes = [mode.from_tensor(t) for t in (q, k, v)]
                fake, _ = attention.attend(MODULE, *fakes, None, sliding_window=window)
        assert (fake.shape, fake.stride()) == (real.shape, real.stride())
        with mode:
            grads = torch.autograd.grad(fake.sum(), fakes)
        for a, b in zip(grads, torch.autograd.grad(real.sum(), (q, k, v)), strict=True):
            assert (a.shape, a.stride()) == (b.shape, b.stride())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"attention_mask": torch.ones(3, 1, 13, 13)}, "a mask tensor"),
        ({"dropout": 0.1}, r"dropout 0\.1"),
        ({"s_aux": torch.ones(4)}, "attention sinks"),
    ],
)
def test_what_it_cannot_honour_is_refused(arguments: dict[str, Any], named: str) -> None:
    q, k, v = inputs(4, 2)
    with pytest.raises(ModelError, match=named):
        attention.attend(MODULE, q, k, v, **arguments)


@pytest.mark.parametrize("window", [None, 4])
def test_the_last_queries_over_a_longer_past_are_the_end_of_the_whole(window: int | None) -> None:
    """A prompt read in pieces: each piece's queries stand at the end of the keys they meet."""
    q, k, v = inputs(4, 2)
    whole, _ = attention.attend(MODULE, q, k, v, None, sliding_window=window)
    for start, stop in ((5, 13), (1, 6), (12, 13)):
        part, _ = attention.attend(
            MODULE, q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], None, sliding_window=window
        )
        torch.testing.assert_close(part, whole[:, start:stop], rtol=1e-12, atol=1e-12)


def test_a_wrong_number_of_rows_is_refused() -> None:
    q, k, v = inputs(4, 2)
    with attention.declared(((0, 5, 13),)), pytest.raises(ModelError, match="boundaries for 3 rows"):
        attention.attend(MODULE, q, k, v, None)
