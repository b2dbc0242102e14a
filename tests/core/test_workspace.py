"""Stated workspace = peak of the c10 allocator's own events, to the byte, in both forms."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import skimp.optim.adamw8bit_step
import skimp.optim.adamw_bf16_step  # noqa: F401
from skimp.core.errors import SkimpError
from skimp.core.forms import native_form, reference_only
from skimp.core.workspace import declare_workspace, declared, workspace_bytes


def transient_peak(call) -> int:
    """Peak of live bytes over the call's own allocations, outputs included, from the allocator's events."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del kept
    return peak


def adamw8bit_arguments(n, dtype, _):
    blocks = (n + 255) // 256
    states = [torch.zeros(n, dtype=torch.uint8), torch.zeros(blocks)] * 2
    return (torch.randn(n).to(dtype), torch.randn(n).to(dtype), *states, 1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 5), 0


def adamw_bf16_arguments(n, dtype, _):
    states = [torch.zeros(n, dtype=dtype) for _ in range(2)]
    p, g = torch.randn(n).bfloat16(), torch.randn(n).bfloat16()
    return (p, g, *states, 1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 5), 0


def encode_arguments(n, dtype, keep):
    return (torch.randn(n).to(dtype), True, bool(keep)), n + 4 * ((n + 255) // 256)


def decode_arguments(n, dtype, _):
    return (torch.zeros(n, dtype=torch.uint8), torch.ones((n + 255) // 256), True, dtype), n * dtype.itemsize


def round_arguments(n, dtype, offset):
    return (torch.randn(n).to(dtype), 1, 2, offset), 2 * n


def philox_arguments(n, dtype, offset):
    return (1, 2, offset, n), 8 * n


CASES = {
    "skimp::adamw8bit": adamw8bit_arguments,
    "skimp::adamw_bf16": adamw_bf16_arguments,
    "skimp::dynamic8_encode": encode_arguments,
    "skimp::dynamic8_decode": decode_arguments,
    "skimp::bf16_stochastic_round": round_arguments,
    "skimp::philox": philox_arguments,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "variant"), [(5, 0), (5001, 3), (70_001, 1)])
def test_exact(name, form, dtype, n, variant):
    if form == "native" and native_form(name.split("::")[1], torch.device("cpu")) is None:
        pytest.skip("native kernels are not built")
    arguments, output = CASES[name](n, dtype, variant)
    keywords = {"device": torch.device("cpu")} if name == "skimp::philox" else {}
    operator = getattr(torch.ops.skimp, name.split("::")[1])
    with reference_only() if form == "reference" else contextlib.nullcontext():
        stated = workspace_bytes(name, arguments, keywords)
        assert transient_peak(lambda: operator(*arguments, **keywords)) == stated + output
        meta = tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments)
        if form == "reference" and not keywords:
            assert workspace_bytes(name, meta) >= stated  # another device also copies the tables
    if form == "native" and (name.startswith("skimp::adamw") or dtype == torch.float32):
        assert stated == 0


def test_every_operator_is_covered_and_names_are_read_with_overloads():
    assert {name for name in declared() if name.startswith("skimp::")} >= set(CASES)
    arguments, _ = adamw_bf16_arguments(5001, torch.float32, 0)
    with reference_only():
        assert workspace_bytes("skimp::adamw_bf16.default", arguments) > 0
    assert workspace_bytes("aten::mul", ()) == 0
    with pytest.raises(SkimpError, match="one workspace rule"):
        declare_workspace("skimp::adamw8bit")(lambda args, kwargs: 0)
