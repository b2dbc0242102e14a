"""Which kernel a device takes attention with, what it keeps and takes inside, and that its two calls fit together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core import attention
from skimp.core.cuda_attention import kernel_for
from skimp.core.errors import ModelError
from skimp.core.memory.trace import Trace
from skimp.core.memory.tracker import Tracker

MODULE: Any = SimpleNamespace(is_causal=True)
HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "softcap", "kernel"),
    [
        ("8.0", HALF, 64, None, "flash"),
        ("9.0", HALF, 128, None, "flash"),
        ("12.0", HALF, 128, None, "flash"),
        ("8.9", HALF, 256, None, "flash"),
        ("8.9", HALF, 208, None, "efficient"),  # its backward wants a data centre card's shared memory
        ("9.0", HALF, 208, None, "flash"),
        ("8.0", HALF, 264, None, "efficient"),
        ("8.0", HALF, 36, None, "blocks"),
        ("8.0", FULL, 36, None, "efficient"),
        ("8.0", FULL, 64, None, "efficient"),
        ("8.0", FULL, 62, None, "blocks"),
        ("7.5", torch.float16, 64, None, "efficient"),
        ("7.5", HALF, 64, None, "blocks"),
        ("7.0", FULL, 64, None, "efficient"),
        ("8.0", HALF, 64, 50.0, "blocks"),
        ("8.0", torch.float64, 64, None, "blocks"),
        ("gfx942", HALF, 128, None, "flash"),
        ("gfx942", FULL, 128, None, "blocks"),
        ("", HALF, 64, None, "flash"),
    ],
)
def test_the_kernel_of_each_device(
    capability: str, dtype: torch.dtype, head_dim: int, softcap: float | None, kernel: str
) -> None:
    assert kernel_for(capability, dtype, head_dim, softcap) == kernel


def simulated(target: str, dtype: torch.dtype, heads: int, kv: int, documents: Any = None, **how: Any) -> Any:
    """(operators, trace of sizes, bytes kept for backward, peak) of two rows of 300 tokens, heads of 64."""
    trace = Trace()
    with attention.target(target), FakeTensorMode(), Tracker(operators=True, host_rules=False, trace=trace) as tracker:
        q, k, v = (torch.randn(2, 300, n, 64, dtype=dtype).transpose(1, 2).requires_grad_() for n in (heads, kv, kv))
        before = tracker.live
        with attention.declared(documents):
            out, _ = attention.attend(MODULE, q, k, v, None, **how)
        kept = tracker.live - before
        assert out.shape == (2, 300, heads, 64)
        out.backward(torch.ones_like(out))
        for tensor in (q, k, v):
            assert tensor.grad is not None
            assert tensor.grad.shape == tensor.shape
            assert tensor.grad.dtype == dtype
    inside = [size for key, size in trace.events() if key == -1 and size > 0]
    return tracker.operators, inside, kept


def test_flash_keeps_output_and_a_float_a_row_and_takes_a_float32_copy_of_queries_inside() -> None:
    names, inside, kept = simulated("cuda:8.0", HALF, 8, 2)
    assert sum("_flash_attention_forward" in n for n in names) == 1
    tokens = 600
    small = kept - (tokens * 8 * 64 * 2 + tokens * 8 * 4)
    assert 0 < small < 100  # the offsets and the random state
    rows = tokens + 2 * 128
    assert inside == [4 * rows * 8 * (64 + 1) + 2 * tokens * 8 * 64 * 2]
    alike = simulated("cuda:8.0", HALF, 8, 8)[1]
    assert alike == [4 * rows * 8 * 65]  # nothing to expand where every head has its own keys


def test_documents_and_windows_change_no_bytes_of_flash() -> None:
    plain = simulated("cuda:8.0", HALF, 8, 2)
    packed = simulated("cuda:8.0", HALF, 8, 2, ((0, 100, 300), (0, 300)))
    assert packed[2] - plain[2] == 4  # one more offset
    assert packed[0] == plain[0]
    windowed = simulated("cuda:8.0", HALF, 8, 2, sliding_window=64)
    assert windowed[0] == plain[0]
    assert windowed[2] == plain[2]


def test_efficient_repeats_grouped_keys_for_the_call_and_has_a_row_of_sums_for_each_document() -> None:
    names, inside, kept = simulated("cuda:7.5", FULL, 8, 2)
    assert sum("_efficient_attention_forward" in n for n in names) == 1
    assert sum("efficient_attention_backward" in n for n in names) == 1
    lse = 2 * 8 * 320 * 4  # 300 rounds up to 320
    small = kept - (600 * 8 * 64 * 4 + lse)
    assert 0 < small < 100
    assert inside == [lse]
    more = simulated("cuda:7.5", FULL, 8, 2, ((0, 100, 300), (0, 300)))[1]
    assert more == [3 * 8 * 320 * 4]


@pytest.mark.parametrize(("target", "dtype"), [("cuda:8.0", HALF), ("cuda:gfx942", FULL)])
def test_what_no_kernel_has_runs_in_blocks(target: str, dtype: torch.dtype) -> None:
    names = simulated(target, dtype, 8, 2, softcap=30.0)[0]
    assert not any("attention" in n for n in names)
    assert any("bmm" in n for n in names)


def test_a_cpu_target_uses_the_cpus_own_call() -> None:
    names = simulated("cpu", FULL, 8, 2)[0]
    assert any("for_cpu" in n for n in names)


def test_blocks_look_back_only() -> None:
    both: Any = SimpleNamespace(is_causal=False)
    with attention.target("cuda:gfx942"), FakeTensorMode():
        q = torch.randn(1, 4, 8, 64)
        with pytest.raises(ModelError, match="both sides"):
            attention.attend(both, q, q, q, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_on_a_device_values_and_gradients_are_the_cpus(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 300, n, 64, generator=g).transpose(1, 2) for n in (8, 2, 2)]
    documents = ((0, 100, 300), (0, 300))
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        q, k, v = (t.to(device, kind).requires_grad_() for t in given)
        with attention.declared(documents):
            out, _ = attention.attend(MODULE, q, k, v, None, sliding_window=70)
        out.backward(torch.ones_like(out))
        found.append([t.detach().cpu().double() for t in (out, q.grad, k.grad, v.grad)])  # type: ignore[union-attr]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
