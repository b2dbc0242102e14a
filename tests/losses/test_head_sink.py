"""The in-place sink and the tied embedding: one V x H buffer for every gradient of a tied matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from skimp.core.errors import SkimpError
from skimp.core.memory.oracle import witness
from skimp.losses import linear_cross_entropy, tied_embedding

N, H, V = 123, 37, 251


def make(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = (0.3 * torch.randn(V, H, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    mix = (torch.randn(H, H, generator=g, dtype=torch.float64) / 6).to(dtype).requires_grad_()
    ids = torch.randint(0, 40, (N,), generator=g)  # many repeats
    labels = torch.randint(0, V, (N,), generator=g)
    labels[::5] = -100
    return weight, mix, ids, labels


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tied_gradient_is_embedding_part_plus_head_part(recompute, reduction):
    weight, mix, ids, labels = make()
    want_loss = F.cross_entropy(torch.tanh(F.embedding(ids, weight) @ mix) @ weight.T, labels)
    want_w, want_mix = torch.autograd.grad(want_loss, [weight, mix])
    into = torch.zeros(V, H, dtype=torch.float64)

    def body(ids):
        return torch.tanh(tied_embedding(ids, weight, into) @ mix)

    hidden = checkpoint(body, ids, use_reentrant=False) if recompute else body(ids)
    loss = linear_cross_entropy(hidden, weight, labels, weight_grad_into=into, reduction=reduction, chunk_rows=16)
    if reduction == "none":
        loss = loss.sum() / int((labels != -100).sum())
    loss.backward()
    torch.testing.assert_close(loss, want_loss, rtol=1e-13, atol=0)
    assert weight.grad is None
    assert relative(into, want_w) < 1e-13
    assert relative(mix.grad, want_mix) < 1e-13


def test_the_sink_adds_up_over_micro_batches_and_may_be_the_weights_own_grad():
    weight, mix, ids, labels = make()
    want = F.cross_entropy(torch.tanh(F.embedding(ids, weight) @ mix) @ weight.T, labels)
    want_w, want_mix = torch.autograd.grad(want, [weight, mix])
    weight.grad = torch.zeros_like(weight)
    total, trained = 0.0, int((labels != -100).sum())
    for start, stop in ((0, 3), (3, 80), (80, N)):
        hidden = torch.tanh(tied_embedding(ids[start:stop], weight, weight.grad) @ mix)
        loss = linear_cross_entropy(
            hidden,
            weight,
            labels[start:stop],
            weight_grad_into=weight.grad,
            normaliser=trained,
            chunk_rows=16,
        )
        loss.backward()
        total += float(loss.detach())
    assert abs(total - float(want.detach())) < 1e-12
    assert relative(weight.grad, want_w) < 1e-13
    assert relative(mix.grad, want_mix) < 1e-13


def test_an_accumulate_hook_fires_once_with_both_parts_in_place():
    """With the sink as the weight's own grad, a step inside backward sees it complete."""
    weight, mix, ids, labels = make()
    want = F.cross_entropy(torch.tanh(F.embedding(ids, weight) @ mix) @ weight.T, labels)
    (want_w,) = torch.autograd.grad(want, [weight])
    weight.grad = torch.zeros_like(weight)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    hidden = torch.tanh(tied_embedding(ids, weight, weight.grad) @ mix)
    linear_cross_entropy(hidden, weight, labels, weight_grad_into=weight.grad).backward()
    assert len(seen) == 1
    assert relative(seen[0], want_w) < 1e-13


@pytest.mark.parametrize("into_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_weight(into_dtype):
    weight, mix, ids, labels = make(torch.bfloat16)
    hidden = torch.tanh(F.embedding(ids, weight) @ mix).detach()
    wide = weight.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(F.cross_entropy(hidden.double() @ wide.T, labels), [wide])
    into = torch.zeros(V, H, dtype=into_dtype)
    linear_cross_entropy(hidden, weight, labels, weight_grad_into=into, chunk_rows=50).backward()
    # float32 sink: float32 rounding. bfloat16 sink: one rounding of 2^-9 for each of the three chunks.
    assert relative(into, want) < (1e-6 if into_dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tied_embedding_equals_torchs_and_is_bit_equal_between_runs(dtype, padding_idx):
    weight, _, ids, _ = make(dtype)
    ids = ids.view(3, 41)
    upstream = torch.randn(3, 41, H, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = weight.detach().double().requires_grad_()
    want_rows = F.embedding(ids, wide, padding_idx)
    (want,) = torch.autograd.grad(want_rows, [wide], upstream.double())
    runs = []
    for _ in range(2):
        into = torch.zeros(V, H, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        rows = tied_embedding(ids, weight, into, padding_idx)
        assert torch.equal(rows.double(), want_rows)
        rows.backward(upstream)
        runs.append(into)
    assert weight.grad is None
    assert torch.equal(*runs)
    assert relative(runs[0], want) < (1e-14 if dtype == torch.float64 else 1e-6)


def test_no_second_vocabulary_sized_buffer_exists():
    weight, mix, ids, labels = make(torch.float32)
    into = torch.zeros(V, H)

    def step():
        hidden = tied_embedding(ids, weight, into) @ mix
        linear_cross_entropy(hidden, weight, labels, weight_grad_into=into, chunk_rows=8).backward()

    step()
    mix.grad = None
    _, seen = witness(step)
    assert V * H * 4 not in seen.events  # 37148 bytes: nothing else here has this size
    assert max(seen.events) == N * H * 4


def test_frozen_hidden_and_no_grad():
    weight, _, ids, labels = make()
    hidden = F.embedding(ids, weight).detach()
    into = torch.zeros(V, H, dtype=torch.float64)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, weight_grad_into=into)
    assert torch.count_nonzero(into) == 0
    linear_cross_entropy(hidden, weight, labels, weight_grad_into=into).backward()
    (want,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels), [weight])
    assert relative(into, want) < 1e-13


def test_grad_scale_scales_loss_and_all_gradients():
    weight, mix, ids, labels = make()
    into = torch.zeros(V, H, dtype=torch.float64)
    hidden = F.embedding(ids, weight.detach()) @ mix
    loss = linear_cross_entropy(hidden, weight, labels, weight_grad_into=into, grad_scale=8.0)
    loss.backward()
    want = 8.0 * F.cross_entropy(F.embedding(ids, weight.detach()) @ mix @ weight.T, labels)
    want_w, want_mix = torch.autograd.grad(want, [weight, mix])
    torch.testing.assert_close(loss, want, rtol=1e-13, atol=0)
    assert relative(into, want_w) < 1e-13
    assert relative(mix.grad, want_mix) < 1e-13


def test_what_would_make_the_sink_wrong_is_refused():
    weight, mix, ids, labels = make()
    into = torch.zeros(V, H, dtype=torch.float64)

    def head(hidden):
        return linear_cross_entropy(hidden, weight, labels, weight_grad_into=into)

    hidden = F.embedding(ids, weight.detach()) @ mix
    with pytest.raises(SkimpError, match="upstream gradient other than 1"):
        (head(hidden) * 0.5).backward()
    hidden = F.embedding(ids, weight.detach()) @ mix
    loss = head(hidden)
    loss.backward(retain_graph=True)
    with pytest.raises(SkimpError, match="second backward"):
        loss.backward()
    hidden = (F.embedding(ids, weight.detach()) @ mix).detach().requires_grad_()
    with pytest.raises(SkimpError, match="recomputed region"):
        checkpoint(head, hidden, use_reentrant=True).backward()
    with pytest.raises(SkimpError, match="frozen"):
        linear_cross_entropy(hidden, weight.detach(), labels, weight_grad_into=into)
    with pytest.raises(SkimpError, match="weight_grad_into"):
        tied_embedding(ids, weight, torch.zeros(V, H + 1))
