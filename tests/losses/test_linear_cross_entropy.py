"""The chunked head against the plain definition: values and every gradient, odd shapes, every option."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from skimp.core.errors import DataError, SkimpError
from skimp.losses import linear_cross_entropy, linear_cross_entropy_eval, reference_cross_entropy

N, H, V = 123, 37, 251
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 0.01},
    "cap": {"softcap": 5.0},
    "scale": {"logit_scale": 0.3},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 4.0, "logit_scale": 1.7},
}


def make(dtype=torch.float64, weight_dtype=None, seed=0, n=N):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, H, generator=g, dtype=torch.float64)).to(weight_dtype or dtype).requires_grad_()
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(weight_dtype or dtype).requires_grad_()
    labels = torch.randint(0, V, (n,), generator=g)
    labels[::5] = -100
    weights = torch.rand(n, generator=g, dtype=torch.float64) * 2
    return hidden, weight, bias, labels, weights


def difference(got, want):
    """Largest relative difference over a list of tensors, by norm."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(got, want, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("rows", [1, 7, N, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("weighted", [False, True], ids=["ones", "weights"])
def test_value_and_gradients_equal_the_definition(options, reduction, rows, weighted):
    hidden, weight, bias, labels, weights = make()
    kw = {**options, "reduction": reduction, "bias": bias, "token_weights": weights if weighted else None}
    got = linear_cross_entropy(hidden, weight, labels, chunk_rows=rows, **kw)
    want = reference_cross_entropy(hidden, weight, labels, **kw)
    assert got.shape == want.shape
    # A non-uniform upstream: B07's case under "none".
    upstream = torch.arange(N, dtype=torch.float64) - 3 if reduction == "none" else torch.tensor(-1.7).double()
    inputs = [hidden, weight, bias]
    # float64: 1e-16 times the length of the sums (V, N); 1e-13 leaves a factor of a few.
    pair = [(x, *torch.autograd.grad(x, inputs, upstream)) for x in (got, want)]
    assert difference(*pair) < 1e-13


def test_equals_torch_cross_entropy_and_a_batch_keeps_its_shape():
    hidden, weight, _, labels, _ = make()
    want = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=0.1)
    got = linear_cross_entropy(hidden.view(3, 41, H), weight, labels.view(3, 41), label_smoothing=0.1, chunk_rows=8)
    pair = [(x, *torch.autograd.grad(x, [hidden, weight])) for x in (got, want)]
    assert difference(*pair) < 1e-13
    each = linear_cross_entropy(hidden.view(3, 41, H), weight, labels.view(3, 41), reduction="none")
    assert each.shape == (3, 41)


def test_a_token_of_weight_two_counts_as_two_tokens_z_loss_included():
    hidden, weight, _, labels, _ = make()
    weights = torch.ones(N, dtype=torch.float64)
    weights[7] = 2
    got = linear_cross_entropy(hidden, weight, labels, token_weights=weights, z_loss=0.1, label_smoothing=0.1)
    twice = torch.cat([torch.arange(N), torch.tensor([7])])
    want = linear_cross_entropy(hidden[twice], weight, labels[twice], z_loss=0.1, label_smoothing=0.1)
    pair = [(x, *torch.autograd.grad(x, [hidden, weight])) for x in (got, want)]
    assert difference(*pair) < 1e-13


def test_chunking_is_invisible_in_float32():
    hidden, weight, _, labels, _ = make(torch.float32)
    results = []
    for rows in (1, 7, 64, N):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=rows)
        results.append([loss, *torch.autograd.grad(loss, [hidden, weight])])
    for other in results[1:]:
        assert difference(other, results[0]) < 1e-6


@pytest.mark.parametrize(("train_h", "train_w", "train_b"), list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_parts(train_h, train_w, train_b, reduction):
    hidden, weight, bias, labels, _ = make()
    for tensor, train in ((hidden, train_h), (weight, train_w), (bias, train_b)):
        tensor.requires_grad_(train)
    before = hidden.detach().clone()
    got = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, chunk_rows=16).sum()
    want = reference_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction).sum()
    assert got.requires_grad == (train_h or train_w or train_b)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
    trained = [t for t in (hidden, weight, bias) if t.requires_grad]
    if trained:
        assert difference(torch.autograd.grad(got, trained), torch.autograd.grad(want, trained)) < 1e-13
    assert torch.equal(hidden, before)


def test_ignored_rows_have_no_loss_and_no_gradient_and_all_ignored_is_zero():
    hidden, weight, _, labels, _ = make()
    each = linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert torch.count_nonzero(each[::5]) == 0
    (dh,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_rows=7), [hidden])
    assert torch.count_nonzero(dh[::5]) == 0
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), z_loss=0.1)
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert float(loss.detach()) == 0.0
    assert all(torch.count_nonzero(g) == 0 for g in grads)
    custom = torch.where(labels == -100, 3, labels)
    got = linear_cross_entropy(hidden, weight, custom, ignore_index=3)
    torch.testing.assert_close(got, F.cross_entropy(hidden @ weight.T, custom, ignore_index=3), rtol=1e-13, atol=0)


@pytest.mark.parametrize("cuts", [[4, 12, 44, N], [1, 2, N]], ids=["uneven", "short-first"])
def test_accumulation_over_uneven_micro_batches_is_the_large_batch(cuts):
    """B01, B02: every micro-batch is divided by the trained tokens of the whole optimizer step."""
    hidden, weight, _, labels, weights = make()
    for kw in ({}, {"token_weights": weights}):
        total = float((weights if kw else torch.ones(N))[labels != -100].sum())
        want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, **kw), [hidden, weight])
        loss, start = 0.0, 0
        for stop in cuts:
            part = {k: v[start:stop] for k, v in kw.items()}
            loss = loss + linear_cross_entropy(
                hidden[start:stop], weight, labels[start:stop], normaliser=total, chunk_rows=5, **part
            )
            start = stop
        assert difference(torch.autograd.grad(loss, [hidden, weight]), want) < 1e-13


def test_bfloat16_weight_gradient_does_not_worsen_with_the_number_of_chunks():
    """B08: 4096 tokens in up to 512 chunks: the head's error stays; without float32 it grows."""
    hidden, weight, _, labels, _ = make(torch.bfloat16, n=4096)
    exact = linear_cross_entropy(hidden.double(), weight.double(), labels)
    (want,) = torch.autograd.grad(exact, [weight])
    errors = {}
    for accumulate, rows in itertools.product(["float32", "weight"], [4096, 64, 8]):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=rows, accumulate=accumulate)
        (got,) = torch.autograd.grad(loss, [weight])
        errors[accumulate, rows] = difference([got], [want.bfloat16()])
    # Both are rounded to bfloat16 once, and differ only where float32 rounding crosses a bfloat16 step.
    assert max(errors["float32", rows] for rows in (4096, 64, 8)) < 2e-4
    assert errors["weight", 8] > 10 * errors["float32", 8]
    assert errors["weight", 8] > errors["weight", 64] > errors["weight", 4096]


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "compute", "limit"),
    [
        (torch.bfloat16, torch.bfloat16, None, 3e-3),  # outputs are stored in bfloat16: 2^-9 relative
        (torch.bfloat16, torch.float32, None, 3e-3),
        (torch.float32, torch.bfloat16, None, 3e-3),
        (torch.float32, torch.float32, torch.bfloat16, 8e-3),  # operands rounded: several 2^-9
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, 8e-3),
        (torch.bfloat16, torch.float32, torch.bfloat16, 8e-3),
        (torch.float32, torch.bfloat16, torch.bfloat16, 8e-3),
        (torch.float16, torch.float16, None, 4e-4),
        (torch.float64, torch.float32, None, 1e-6),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_dtypes(dtype, weight_dtype, compute, limit, options, monkeypatch):
    # Three vocabulary tiles, the last one odd.
    monkeypatch.setattr("skimp.losses.head_spec.TILE_NUMBERS", 100 * H)
    hidden, weight, bias, labels, _ = make(dtype, weight_dtype)
    loss = linear_cross_entropy(
        hidden, weight, labels, bias=bias, reduction="sum", chunk_rows=50, compute_dtype=compute, **options
    )
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    grads = torch.autograd.grad(loss, [hidden, weight, bias])
    assert [g.dtype for g in grads] == [hidden.dtype, weight.dtype, bias.dtype]
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    want = reference_cross_entropy(wide[0], wide[1], labels, bias=wide[2], reduction="sum", **options)
    assert difference([loss, *grads], [want, *torch.autograd.grad(want, wide)]) < limit


def test_autocast_gives_float32_loss_and_the_same_gradients():
    """bf16-mixed: hidden states in bfloat16, weight in float32. On the CPU the products stay in float32."""
    hidden, weight, _, labels, _ = make(torch.bfloat16, torch.float32)
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_rows=16), [hidden, weight])
    for reduction in ("sum", "none"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_rows=16).sum()
        assert loss.dtype == torch.float32
        got = torch.autograd.grad(loss / int((labels != -100).sum()), [hidden, weight])
        assert difference(got, want) < 4e-3  # dh is bfloat16 and rounded before, not after, the division


def test_under_recomputation_gradients_are_bit_equal():
    hidden, weight, _, labels, _ = make(torch.float32)

    def head(h):
        return linear_cross_entropy(torch.tanh(h), weight, labels, chunk_rows=16)

    want = torch.autograd.grad(head(hidden), [hidden, weight])
    for reentrant in (False, True):
        hidden.grad = weight.grad = None
        checkpoint(head, hidden, use_reentrant=reentrant).backward()
        assert torch.equal(hidden.grad, want[0])
        assert torch.equal(weight.grad, want[1])


def test_second_backward_is_an_error_or_right_and_double_differentiation_is_an_error():
    hidden, weight, _, labels, _ = make()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(SkimpError, match="second backward"):
        loss.backward()
    each = linear_cross_entropy(hidden, weight, labels, reduction="none").sum()
    first = torch.autograd.grad(each, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(each, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
        with pytest.raises(SkimpError, match="create_graph"):
            torch.autograd.grad(loss, [hidden], create_graph=True)


def test_the_loss_does_not_hold_on_to_logits_without_grad():
    hidden, weight, _, labels, _ = make()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, weight_grad_into=torch.zeros(V, H, dtype=torch.float64))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference_cross_entropy(hidden, weight, labels).detach())


class Recorder(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not str(func).startswith("prim."):  # a fake tensor is asked for its device; nothing runs
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [False, True], ids=["autograd", "sink"])
def test_a_simulated_and_a_real_run_make_the_same_operators_whatever_the_labels(reduction, dtype, sink):
    def operators(labels_from, fake):
        mode = FakeTensorMode() if fake else torch.no_grad()
        with mode if fake else torch.enable_grad():
            hidden = torch.zeros(N, H, dtype=dtype, requires_grad=True)
            weight = torch.zeros(V, H, dtype=dtype, requires_grad=True)
            labels = labels_from()
            into = torch.zeros(V, H) if sink else None
            with Recorder() as seen:
                kw = {
                    **OPTIONS["all"],
                    "token_weights": torch.ones(N),
                    "chunk_rows": 50,
                    "reduction": reduction,
                }
                linear_cross_entropy(hidden, weight, labels, weight_grad_into=into, **kw).sum().backward()
                linear_cross_entropy_eval(hidden, weight, labels, chunk_rows=50)
        return seen.names

    real = operators(lambda: torch.arange(N), fake=False)
    ignored = operators(lambda: torch.full((N,), -100), fake=False)
    fake = operators(lambda: torch.zeros(N, dtype=torch.int64), fake=True)
    assert len(real) > 100
    assert real == ignored == fake


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 16, None])
def test_evaluation(dtype, rows):
    hidden, weight, bias, labels, _ = make(dtype)
    labels[3] = (hidden @ weight.T + bias).argmax(-1)[3]  # at least one right
    with torch.no_grad():
        bias[0] = 100.0 if rows == 16 else bias[0]  # 0 wins everywhere: ignored rows must not count as right
    labels[1] = 0
    total, right, n = linear_cross_entropy_eval(
        hidden, weight, labels, bias=bias, softcap=6.0, logit_scale=0.5, chunk_rows=rows
    )
    kept = labels != -100
    logits = 6.0 * torch.tanh(0.5 * (hidden.double() @ weight.double().T + bias.double()) / 6.0)
    want = F.cross_entropy(logits, labels, reduction="sum")
    assert abs(float(total) - float(want)) < (1e-10 if dtype == torch.float64 else 1e-4) * float(want)
    assert int(n) == int(kept.sum())
    assert int(right) == int((logits.argmax(-1)[kept] == labels[kept]).sum()) > 0
    assert not total.requires_grad


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"labels": torch.zeros(N - 1, dtype=torch.int64)}, "labels of shape"),
        ({"labels": torch.zeros(N, dtype=torch.int32)}, "int64"),
        ({"weight": torch.zeros(V, H + 1)}, "weight"),
        ({"bias": torch.zeros(V + 1)}, "bias"),
        ({"token_weights": torch.zeros(N - 1)}, "token_weights"),
        ({"token_weights": torch.zeros(N, requires_grad=True)}, "without gradient"),
        ({"reduction": "average"}, "reduction"),
        ({"normaliser": 3, "reduction": "sum"}, "only the mean"),
        ({"normaliser": 0}, "no trained token"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"softcap": 0.0}, "softcap"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"accumulate": "bf16"}, "accumulate"),
        ({"compute_dtype": torch.float64}, "compute_dtype"),
        ({"weight_grad_into": torch.zeros(V, H + 1)}, "weight_grad_into"),
        ({"weight_grad_into": torch.zeros(V, H, dtype=torch.bfloat16)}, "weight_grad_into"),
    ],
    ids=lambda c: "-".join(c) if isinstance(c, dict) else "",
)
def test_bad_arguments_are_refused_by_name(change, match):
    arguments = {
        "hidden": torch.zeros(N, H),
        "weight": torch.zeros(V, H, requires_grad=True),
        "labels": torch.zeros(N, dtype=torch.int64),
        **change,
    }
    with pytest.raises(SkimpError, match=match):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize("bad", [V, -1])
def test_a_label_outside_the_vocabulary_is_an_error_of_the_data(bad):
    hidden, weight, _, labels, _ = make(torch.float32)
    labels[60] = bad
    with pytest.raises(DataError, match="tokenizer"):
        linear_cross_entropy(hidden, weight, labels, chunk_rows=16)
