"""The byte formula of the head against the allocator's own events, to the byte."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker
from skimp.core.registry import facts, load
from skimp.losses import chunk_bytes, default_rows, linear_cross_entropy, linear_cross_entropy_eval

N, H, V = 300, 57, 5003

CASES = {
    "plain": ({}, {}),
    "cap": ({"softcap": 5.0}, {"softcap": True}),
    "scale": ({"logit_scale": 0.5}, {"logit_scale": True}),
    "smoothing-z": ({"label_smoothing": 0.1, "z_loss": 1e-3}, {"label_smoothing": True}),
    "sink": ({"sink": True}, {"sink": True}),
    "frozen-weight": ({"frozen": "w"}, {"train_weight": False}),
    "frozen-hidden": ({"frozen": "h"}, {"train_hidden": False}),
    "accumulate": ({"accumulate": "weight"}, {"accumulate": "weight"}),
}


@pytest.mark.parametrize("rows", [64, 128, N])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_formula_equals_the_allocators_peak(case, dtype, rows):
    options, flags = dict(case[0]), case[1]
    frozen, sink = options.pop("frozen", ""), options.pop("sink", False)
    hidden = torch.zeros(N, H, dtype=dtype, requires_grad=frozen != "h")
    weight = torch.zeros(V, H, dtype=dtype, requires_grad=frozen != "w")
    labels = torch.arange(N)
    if sink:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        options["weight_grad_into"] = torch.zeros(V, H, dtype=wide)
    _, seen = witness(lambda: linear_cross_entropy(hidden, weight, labels, chunk_rows=rows, **options))
    assert seen.peak == chunk_bytes(N, H, V, dtype, rows, **flags)


def test_formula_by_hand():
    columns = 3 * 64 * 4
    held = N * (8 + 4 + 4)
    assert chunk_bytes(N, H, V, torch.float32, 64) == held + N * H * 4 + V * H * 4 + 64 * V * 4 + columns
    # bfloat16 storage, products in float32: casts of 64 hidden rows and of the weight (one tile here: V < 4
    # Mi / H), the hidden gradient's float32 sum, and the float32 accumulator of the weight gradient.
    casts = 64 * H * 4 + V * H * 4 + 64 * H * 4
    assert chunk_bytes(N, H, V, torch.bfloat16, 64) == held + N * H * 2 + V * H * 4 + 64 * V * 4 + columns + casts


def test_what_is_held_after_forward_is_the_two_gradients_and_the_loss():
    hidden = torch.zeros(N, H, requires_grad=True)
    weight = torch.zeros(V, H, requires_grad=True)
    loss, seen = witness(lambda: linear_cross_entropy(hidden, weight, torch.arange(N)))
    assert seen.held == N * H * 4 + V * H * 4 + 4
    _, seen = witness(loss.backward)
    # The implicit ones; the gradients themselves are handed over, not copied.
    assert seen.peak <= 8


def test_evaluation_is_flat_in_the_number_of_tokens():
    weight = torch.zeros(V, H)
    peaks = []
    for n in (N, 4 * N):
        hidden, labels = torch.zeros(n, H), torch.zeros(n, dtype=torch.int64)
        _, seen = witness(lambda h=hidden, y=labels: linear_cross_entropy_eval(h, weight, y, chunk_rows=64))
        peaks.append(seen.peak - n * (8 + 8 + 4 + 4))
    assert peaks[0] == peaks[1] == 64 * V * 4 + 3 * 64 * 4


def test_the_plain_path_grows_with_tokens_times_vocabulary_and_the_chunked_does_not():
    def peak(call, n):
        hidden = torch.zeros(n, H, requires_grad=True)
        weight = torch.zeros(V, H, requires_grad=True)
        labels = torch.zeros(n, dtype=torch.int64)
        return witness(lambda: call(hidden, weight, labels).backward())[1].peak

    def plain(hidden, weight, labels):
        return F.cross_entropy(hidden @ weight.T, labels)

    def chunks(hidden, weight, labels):
        return linear_cross_entropy(hidden, weight, labels, chunk_rows=64)

    assert peak(plain, 2 * N) - peak(plain, N) > 2 * N * V * 4  # logits and log-softmax, at least
    assert peak(chunks, 2 * N) - peak(chunks, N) == N * (H * 4 + 8 + 4 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tracked_simulated_and_measured_peaks_are_one_number(dtype, reduction):
    def step():
        hidden = torch.zeros(N, H, dtype=dtype, requires_grad=True)
        weight = torch.zeros(V, H, dtype=dtype, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, torch.arange(N), chunk_rows=64, softcap=9, reduction=reduction)
        loss.sum().backward()

    peaks = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode, Tracker() as tracker:
            step()
        peaks.append(tracker.peak)
    _, seen = witness(step)
    assert peaks[0].total == peaks[1].total == seen.peak
    assert peaks[1].by_category == peaks[0].by_category
    assert peaks[0].by_category["logits"] == 2 * 64 * V * 4
    assert peaks[0].by_category["gradients"] == V * H * 4


def test_default_rows():
    assert default_rows(2048, 576, 49152) == 256
    assert default_rows(8192, 4096, 128256) == 320
    assert default_rows(100, 576, 49152) == 100
    assert default_rows(10**6, 4096, 32000) == 2048
    assert default_rows(1, 8, 11) == 1


def test_listed_without_torch_and_loaded_on_demand():
    code = "import sys, skimp.losses; assert skimp.losses.FACTS and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert facts("chunked-cross-entropy", "loss head").exact
    assert load("chunked-cross-entropy") is linear_cross_entropy
