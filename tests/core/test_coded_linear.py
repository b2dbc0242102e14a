"""Coded layers: products equal those of the decoded matrix, nothing dense survives, and they save like any tensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core import coded
from skimp.core.codecs import NF4, Int4, Int8
from skimp.core.coded import Coded, dense_rows, product, product_back, without_values
from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.errors import SkimpError
from skimp.core.forms import reference_only
from skimp.core.memory.tracker import Tracker
from skimp.core.workspace import workspace_bytes
from skimp.kernels.native.nf4 import load

CODECS = pytest.mark.parametrize("codec", [NF4(), NF4(128, False), Int8(), Int4(16, False)], ids=str)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(codec: Any, outputs: int = 37, inputs: int = 70, bias: bool = True, **more: Any) -> CodedLinear:
    made = CodedLinear(inputs, outputs, codec, bias=bias, **more)
    made.take(normal(*((inputs, outputs) if made.stored_transposed else (outputs, inputs)), seed=5))
    if made.bias is not None:
        made.bias.data.copy_(normal(outputs, seed=6))
    return made


@CODECS
@pytest.mark.parametrize("slice_", [2**20, 70 * 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forward_and_dx_are_those_of_the_decoded_matrix(
    codec: Any, slice_: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded, "SLICE", slice_)
    module = layer(codec)
    dense = module.weight.dense(dtype)
    x = normal(2, 3, 70, seed=1, dtype=dtype).requires_grad_()
    g = normal(2, 3, 37, seed=2, dtype=dtype)
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, g)
    expected = nn.functional.linear(x, dense, None if module.bias is None else module.bias.to(dtype))
    (dx_expected,) = torch.autograd.grad(expected, x, g)
    if slice_ == 2**20:
        assert torch.equal(y, expected)
        assert torch.equal(dx, dx_expected)
    else:  # slices: sums in another order, in float32 at least
        ulp = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(y, expected, rtol=ulp, atol=20 * ulp)
        torch.testing.assert_close(dx, dx_expected, rtol=ulp, atol=20 * ulp)


@pytest.mark.parametrize("codec", [NF4(), NF4(128, False)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8, 9])
def test_a_few_rows_are_multiplied_from_the_codes(codec: Any, rows: int) -> None:
    load()
    module = layer(codec, 37, 256)
    x = normal(rows, 256, seed=1)
    assert module.bias is not None
    expected = (x.double() @ module.weight.dense(torch.float64).t() + module.bias.double()).float()
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=2e-5)
    plain = layer(codec, 37, 256, bias=False)
    torch.testing.assert_close(plain(x), expected - module.bias, rtol=1e-5, atol=3e-5)
    with reference_only():
        torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=2e-5)


def test_a_bias_that_asks_for_a_gradient_gets_it_and_autocast_decides_the_dtype() -> None:
    module = layer(NF4())
    assert module.bias is not None
    module.bias.requires_grad_()
    x = normal(4, 70)
    module(x).sum().backward()
    assert torch.equal(module.bias.grad, torch.full((37,), 4.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


def test_no_dense_weight_survives_and_the_peak_is_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    monkeypatch.setattr(coded, "SLICE", 256 * 16)
    module = layer(NF4(), 512, 256, bias=False)
    x, tracker = normal(8, 256).requires_grad_(), Tracker()
    with tracker:
        tracker.hold([*module.buffers(), x], "weights")
        rest = tracker.live
        y = module(x)
        assert tracker.live - rest == y.nbytes  # nothing is kept for backward but what exists already
        tracker.reset_peak()
        y.sum().backward()
        gradients = y.nbytes + 4 + 4  # of y (expanded: one number), the sum's own
    assert x.grad is not None
    sides = [module.weight_absmax, module.weight_nested_absmax, module.weight_offset]
    decode = (module.weight_codes, sides, 64, 0, 256 * 16, torch.float32)
    slice_bytes = 256 * 16 * 4 + workspace_bytes("skimp::nf4_decode", decode)
    assert tracker.peak.total - rest <= y.nbytes + x.grad.nbytes + slice_bytes + gradients
    assert tracker.peak.total - rest < 512 * 256 * 4  # a dense copy alone would be more


@CODECS
def test_parts_are_ordinary_entries_of_a_state_dict(codec: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    module = layer(codec)
    save_file(module.state_dict(), tmp_path / "layer.safetensors")
    other = CodedLinear(70, 37, codec, bias=True)
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = normal(3, 70)
    assert torch.equal(other(x), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert set(module.state_dict()) == {"bias", *(f"weight_{part}" for part in codec.spec((37, 70)))}


def test_a_cast_changes_what_is_decoded_to_and_no_part() -> None:
    module = layer(NF4(double_quant=False))
    before = {key: value.clone() for key, value in module.named_buffers()}
    module.to(torch.bfloat16)
    assert module.weight.dtype == torch.bfloat16
    assert module.bias is not None
    assert module.bias.dtype == torch.bfloat16
    for key, value in module.named_buffers():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])
    assert layer(NF4()).to("meta").weight.device.type == "meta"


def test_sizes_are_those_of_the_matrix_and_bytes_those_of_the_parts() -> None:
    weight = layer(NF4(), 64, 640).weight
    assert weight.numel() == 64 * 640
    assert weight.shape == (64, 640)
    assert weight.nbytes == NF4().nbytes((64, 640))
    assert weight.nbytes * 8 / weight.numel() < 4.14
    model = nn.Sequential(layer(NF4()), nn.ReLU())
    assert [name for name, _ in coded_layers(model)] == ["0"]


def test_a_layer_that_stored_it_turned_is_turned_once() -> None:
    module, plain = layer(NF4(), stored_transposed=True), layer(NF4())
    plain.take(normal(70, 37, seed=5).t())
    assert torch.equal(module.weight.dense(), plain.weight.dense())
    with pytest.raises(SkimpError, match="shape"):
        module.take(normal(37, 70))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_same_calls_serve_dense_weights(transposed: bool) -> None:
    w, x, g, bias = normal(5, 7), normal(3, 7, seed=1), normal(3, 5, seed=2), normal(5, seed=3)
    stored = w.t().contiguous() if transposed else w
    torch.testing.assert_close(product(stored, x, bias, transposed=transposed), x @ w.t() + bias)
    torch.testing.assert_close(product_back(stored, g, transposed=transposed), g @ w)
    assert torch.equal(dense_rows(stored, 1, 4, torch.float32, transposed=transposed), w[1:4])
    matrix = layer(NF4()).weight
    assert isinstance(matrix, Coded)
    assert torch.equal(dense_rows(matrix, 3, 9, torch.float32), matrix.dense()[3:9])
    assert without_values(torch.empty(1, device="meta"))
    assert not without_values(matrix)
