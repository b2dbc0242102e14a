"""A trainable slice against a dense layer: value, every gradient and the bytes kept, for columns and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from skimp.adapters.partial_linear import Side, Where, sliced_linear, sliced_linear_reference
from skimp.core.remake import can_be_remade

ROWS, SEQ = 3, 7
SIDES = ("columns", "rows")


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def case(outputs: int, inputs: int, index: Tensor, side: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    k = index.numel()
    return {
        "x": numbers(ROWS, SEQ, inputs, seed=0, dtype=dtype).requires_grad_(),
        "weight": numbers(outputs, inputs, seed=1, dtype=dtype),
        "bias": numbers(outputs, seed=2, dtype=dtype),
        "block": numbers(*((outputs, k) if side == "columns" else (k, inputs)), seed=3, dtype=dtype).requires_grad_(),
    }


def gradients(y: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, wanted, numbers(*y.shape, seed=5, dtype=y.dtype))


PLACES: dict[str, Where] = {"range": (1, 4), "numbers": torch.tensor([4, 0, 3])}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", [(5, 11), (13, 5), (6, 6)])
def test_block_gradient_is_the_slice_of_the_dense_gradient(
    shape: tuple[int, int], side: Side, place: str, transposed: bool, bias: bool
) -> None:
    where = PLACES[place]
    index = where if isinstance(where, Tensor) else torch.arange(*where)
    given = case(*shape, index, side)
    given["bias"] = given["bias"] if bias else None
    stored = {**given, "weight": given["weight"].t().contiguous()} if transposed else given
    y = sliced_linear(*stored.values(), where, side, transposed=transposed)
    plain = sliced_linear_reference(*given.values(), index, side)
    torch.testing.assert_close(y, plain, rtol=0, atol=1e-12)
    for one, other in zip(
        gradients(y, given["x"], given["block"]), gradients(plain, given["x"], given["block"]), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    # And the dense gradient itself, sliced: what the identity says.
    whole = given["weight"].index_add(1 if side == "columns" else 0, index, given["block"].detach()).requires_grad_()
    dense = torch.autograd.grad(
        torch.nn.functional.linear(given["x"], whole, given["bias"]), whole, numbers(*y.shape, seed=5)
    )[0]
    mine = gradients(y := sliced_linear(*stored.values(), where, side, transposed=transposed), given["block"])[0]
    torch.testing.assert_close(mine, dense.index_select(1 if side == "columns" else 0, index), rtol=0, atol=1e-10)


@pytest.mark.parametrize("side", SIDES)
def test_in_place_and_delta_give_the_same_weights_after_many_steps(side: Side) -> None:
    """AdamW without decay, 100 steps in float32: the block in W itself, or a delta beside W."""
    start, stop = 1, 4
    given = case(6, 7, torch.arange(start, stop), side, torch.float32)
    target = numbers(ROWS, SEQ, 6, seed=9, dtype=torch.float32)
    moved = given["weight"].clone()
    view = moved[:, start:stop] if side == "columns" else moved[start:stop]
    block = torch.nn.Parameter(view)
    assert block.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr()
    delta = torch.nn.Parameter(torch.zeros_like(given["block"]))
    x, bias = given["x"].detach(), given["bias"]
    for parameter, weight, in_place in ((block, moved, True), (delta, given["weight"], False)):
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.0)
        for _ in range(100):
            y = sliced_linear(x, weight, bias, parameter, (start, stop), side, in_place=in_place)
            optimizer.zero_grad()
            (y - target).square().mean().backward()
            optimizer.step()
    whole = given["weight"].clone()
    (whole[:, start:stop] if side == "columns" else whole[start:stop]).add_(delta.detach())
    torch.testing.assert_close(whole, moved, rtol=0, atol=1e-6)
    assert float((moved - given["weight"]).abs().max()) > 1e-2


@pytest.mark.parametrize("side", SIDES)
def test_two_micro_batches_added_up_are_one_batch(side: Side) -> None:
    given = case(6, 7, torch.arange(1, 4), side)
    whole = gradients(sliced_linear(*given.values(), (1, 4), side), given["block"])[0]
    upstream, parts = numbers(ROWS, SEQ, 6, seed=5), []
    for rows in (slice(0, 1), slice(1, ROWS)):
        y = sliced_linear(given["x"][rows], given["weight"], given["bias"], given["block"], (1, 4), side)
        parts.append(torch.autograd.grad(y, given["block"], upstream[rows])[0])
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-12)


def kept_bytes(call: Callable[[], Tensor], beside: list[Tensor]) -> int:
    """Bytes of the storages that one call keeps for backward, but those of `beside`."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(size for at, size in found.items() if at not in {t.untyped_storage().data_ptr() for t in beside})


@pytest.mark.parametrize("place", PLACES)
def test_columns_keep_tokens_times_k_numbers_of_storage_and_no_more(place: str) -> None:
    where = PLACES[place]
    given = case(6, 64, torch.arange(3), "columns", torch.float32)
    own = [given["weight"], given["block"]]
    size = kept_bytes(lambda: sliced_linear(*given.values(), where, "columns"), own)
    assert size == ROWS * SEQ * 3 * 4


def test_rows_keep_their_input_or_what_made_it() -> None:
    given = case(6, 64, torch.arange(3), "rows", torch.float32)
    own = [given["weight"], given["block"]]
    assert kept_bytes(lambda: sliced_linear(*given.values(), (0, 3), "rows"), own) == ROWS * SEQ * 64 * 4
    source = numbers(ROWS, SEQ, 64, seed=8, dtype=torch.float32).requires_grad_()
    plain = gradients(sliced_linear(*given.values(), (0, 3), "rows"), given["block"])
    made = {
        **given,
        "x": can_be_remade(given["x"].detach().clone().requires_grad_(), lambda s: given["x"].detach(), source),
    }
    assert kept_bytes(lambda: sliced_linear(*made.values(), (0, 3), "rows"), [*own, source]) == 0
    again = gradients(sliced_linear(*made.values(), (0, 3), "rows"), made["block"])
    assert torch.equal(plain[0], again[0])


@pytest.mark.parametrize("side", SIDES)
def test_half_precision_base_and_float32_block(side: Side) -> None:
    given = case(6, 8, torch.arange(1, 4), side, torch.bfloat16)
    block = given["block"].detach().float().requires_grad_()
    y = sliced_linear(given["x"], given["weight"], given["bias"], block, (1, 4), side)
    assert y.dtype == torch.bfloat16
    dx, dblock = torch.autograd.grad(y, (given["x"], block), torch.ones_like(y))
    assert (dx.dtype, dblock.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = sliced_linear(given["x"].detach().float(), given["weight"].float(), None, block, (1, 4), side)
    assert y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.float().sum(), block)[0].dtype == torch.float32
