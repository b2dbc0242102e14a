"""A part of a parameter is updated as that part of the whole: by the place of its first number."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

from skimp.core.errors import SkimpError
from skimp.core.forms import reference_only
from skimp.core.registry import load, methods
from skimp.core.sharded import Part, beside, largest_part, local, part_of, zeros_beside
from skimp.optim import AdamMini, AdamW8bit, AdamWBF16
from skimp.optim.adamw4bit_step import adamw4bit
from skimp.optim.adamw8bit_step import adamw8bit
from skimp.optim.adamw_bf16_step import adamw_bf16
from skimp.optim.compact import Compact
from skimp.optim.family_facts import FAMILY

OPTIONS = (1e-2, 0.9, 0.999, 1e-8, 0.1, 3, 77)


@pytest.mark.parametrize("form", [nullcontext, reference_only], ids=["native", "reference"])
@pytest.mark.parametrize("cuts", [(0, 1, 700, 1301), (0, 515, 1301), (0, 2**16 + 3, 2**17 + 9)])
@pytest.mark.parametrize("states", [torch.bfloat16, torch.float32])
def test_parts_of_a_bf16_parameter_round_as_the_whole(form: Any, cuts: tuple[int, ...], states: torch.dtype) -> None:
    n = cuts[-1]
    g = torch.randn(n)
    whole = [torch.randn(n).to(torch.bfloat16), torch.randn(n).to(states), torch.rand(n).to(states)]
    parts = [t.clone() for t in whole]
    with form():
        adamw_bf16(whole[0], g, whole[1], whole[2], *OPTIONS)
        for start, stop in pairwise(cuts):
            here = [t[start:stop] for t in parts]
            adamw_bf16(here[0], g[start:stop], here[1], here[2], *OPTIONS, start)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("form", [nullcontext, reference_only], ids=["native", "reference"])
def test_parts_at_block_borders_equal_the_whole_with_8_bit_states(form: Any) -> None:
    n, cut = 1301, 768
    g = torch.randn(n)
    codes = [torch.randint(0, 256, (n,), dtype=torch.uint8) for _ in range(2)]
    maxima = [torch.rand(6) for _ in range(2)]
    whole = [torch.randn(n).to(torch.bfloat16), codes[0], maxima[0], codes[1], maxima[1]]
    parts = [t.clone() for t in whole]
    with form():
        adamw8bit(whole[0], g, *whole[1:], *OPTIONS)
        for start, stop in ((0, cut), (cut, n)):
            numbers, blocks = slice(start, stop), slice(start // 256, -(-stop // 256))
            p, m, m_max, v, v_max = (t[blocks if t.numel() == 6 else numbers] for t in parts)
            adamw8bit(p, g[numbers], m, m_max, v, v_max, *OPTIONS, start)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_the_whole_decides_what_state_a_part_gets() -> None:
    rule = AdamW8bit([torch.nn.Parameter(torch.zeros(4, 4))])
    assert rule.state_spec((2, 30), torch.float32, whole=4096)["m"] == ((2, 30), torch.uint8)
    assert rule.state_spec((2, 30), torch.float32, whole=4095)["m"] == ((2, 30), torch.float32)
    assert rule.state_spec((2, 30), torch.float32)["m"] == ((2, 30), torch.float32)
    assert rule.state_spec((3, 100), torch.float32, whole=9000)["m_absmax"] == ((2,), torch.float32)


def test_a_plain_tensor_is_its_own_part() -> None:
    p = torch.zeros(3, 5)
    assert local(p) is p
    assert part_of("w", p) == Part("w", 15, 0, "w")
    assert largest_part(p) == (3, 5)
    assert beside((7,), p, 256) == (7,)
    assert zeros_beside((7,), p, 256, torch.float32).shape == (7,)


@pytest.mark.parametrize("make", [AdamW8bit, AdamWBF16])
def test_spec_and_bytes_of_a_plain_parameter(make: Any) -> None:
    p = torch.nn.Parameter(torch.zeros(70, 70, dtype=torch.bfloat16))
    rule = make([("w", p)])
    assert rule.spec_of(p) == rule.state_spec(p.shape, p.dtype)
    assert rule.bytes_of(p) == rule.state_bytes(p.shape, p.dtype)


@pytest.fixture
def second_of_four() -> Iterator[None]:
    """This process as rank 1 of 4 that are not there: enough to ask what each would hold."""
    store: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=store)
    yield
    torch.distributed.destroy_process_group()


#: shape, mesh, placements ("0" is Shard(0), "r" replicated) -> largest part, offset and address here, shape of a state
#: of 7 blocks on each process.
PLACED = [
    ((64, 128), (4,), "0", (16, 128), 2048, "w", (28,)),
    ((131, 40), (4,), "0", (33, 40), 1320, "w", (4, 7)),
    ((1, 5000), (4,), "0", (1, 5000), 5000, "w", (4, 7)),
    ((128, 40), (4,), "1", (128, 10), 0, "w@1", (4, 7, 1)),
    ((128, 40), (4,), "r", (128, 40), 0, "w", (7,)),
    ((64, 128), (2, 2), "01", (32, 64), 0, "w@0,1", (4, 7, 1, 1, 1)),
    ((64, 128), (2, 2), "r0", (32, 128), 4096, "w", (14,)),
    ((2548 * 2,), (2, 2), "r0", (2548,), 2548, "w", (2, 7)),
]


@pytest.mark.parametrize(("shape", "mesh", "placed", "part", "offset", "address", "state"), PLACED)
def test_parts_and_states_of_every_placement(
    second_of_four: None,
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placed: str,
    part: tuple[int, ...],
    offset: int,
    address: str,
    state: tuple[int, ...],
) -> None:
    tensors = importlib.import_module("torch.distributed.tensor")
    placements = [tensors.Replicate() if c == "r" else tensors.Shard(int(c)) for c in placed]
    device_mesh = torch.distributed.init_device_mesh("cpu", mesh)
    p = tensors.distribute_tensor(torch.zeros(shape), device_mesh, placements)
    assert largest_part(p) == part
    assert part_of("w", p) == Part("w", p.numel(), offset, address)
    assert beside((7,), p, 256) == state
    assert local(zeros_beside((7,), p, 256, torch.float32)).numel() == 7


def test_a_rule_steps_on_columns_of_a_matrix(second_of_four: None) -> None:
    """Tensor-parallel placement: no rows, so blocks and noise are those of this shard alone."""
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    whole = torch.randn(128, 40).bfloat16()
    p = torch.nn.Parameter(tensors.DTensor.from_local(whole[:, 10:20].contiguous(), mesh, [tensors.Shard(1)]))
    rule = AdamW8bit([("w", p)], lr=0.1)
    p.grad = tensors.DTensor.from_local(torch.ones(128, 10).bfloat16(), mesh, [tensors.Shard(1)])
    before = local(p).clone()
    rule.step()
    assert local(rule.state[p]["m"]).shape == (128, 10)
    assert (local(p) < before).float().mean() > 0.9
    with pytest.raises(SkimpError, match="a sharded gradient"):
        rule.step_parameter(p, torch.ones(128, 40).bfloat16())


def test_parameters_put_into_the_groups_by_others_keep_their_names() -> None:
    """Accelerate's FSDP2 swaps sharded parameters for those the optimizer was made with, in place."""
    old, new = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    rule = AdamW8bit([("w", old)], lr=0.1)
    rule.param_groups[0]["params"] = [new]
    new.grad = torch.ones(4, 4)
    rule.step()
    assert rule.parameters() == [new]
    assert rule.name_of(new) == "w"
    assert [name for name, key, _ in rule.named_state() if key == "step"] == ["w"]
    assert [row.parameter for row in rule.table()] == ["w"]
    assert float(new.detach().mean()) < 1.0


HIDDEN = {"role": "up", "columns": False, "head_dim": 0}


#: Rules whose updates are functions of whole matrices; all others have a row of two processes (`contract`).
WHOLE = ["muon", "dion", "adafactor", "came", "stable-spam"]
PROJECTED = [f.name for f in FAMILY]


def test_every_rule_shards_or_is_refused_a_shard() -> None:
    rules = {name for name, facts in methods().items() if facts.kind == "update rule"}
    by_element = {"adamw", "adamw-bf16", "adamw8bit", "adamw4bit", "lion", "spam"}
    assert rules == by_element | {"adam-mini", *WHOLE, *PROJECTED}


@pytest.mark.parametrize("name", [*WHOLE, *PROJECTED])
def test_what_is_updated_as_a_whole_refuses_a_shard_and_takes_a_copy(second_of_four: None, name: str) -> None:
    """A shard would be another rule; a replicated parameter is whole on every process."""
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    make = load(name, "update rule")

    def stepped(placement: Any) -> None:
        p = torch.nn.Parameter(tensors.distribute_tensor(torch.randn(8, 12), mesh, [placement]))
        more = {"rank": 1 if name == "apollo-mini" else 2} if name in PROJECTED else {}
        more |= {"history": 1} if name == "natural-galore" else {}
        rule = make([{"params": [("w", p)], **HIDDEN}], lr=0.1, **more)
        p.grad = tensors.distribute_tensor(torch.ones(8, 12), mesh, [placement])
        before = local(p).clone()
        rule.step()
        assert not torch.equal(local(p), before)

    stepped(tensors.Replicate())
    with pytest.raises(SkimpError, match="a function of the whole tensor"):
        stepped(tensors.Shard(0))


def test_compact_gradients_of_a_sharded_layer_are_refused(second_of_four: None) -> None:
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    layer = torch.nn.Linear(12, 8, bias=False)
    layer.weight = torch.nn.Parameter(tensors.distribute_tensor(layer.weight.detach(), mesh, [tensors.Shard(0)]))
    rule = load("grass", "update rule")([("weight", layer.weight)], rank=2)
    with pytest.raises(SkimpError, match=r"sharded over processes[\s\S]*whole gradient"):
        Compact(layer, rule)
    assert "forward" not in vars(layer)


def test_replicated_matrices_of_one_shape_move_as_plain_ones_do(second_of_four: None) -> None:
    """Muon stacks plain ones; of DTensors each process moves its own numbers, one matrix at a time."""
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    weights, grads = [torch.randn(8, 12) for _ in range(3)], [torch.randn(8, 12) for _ in range(3)]
    found = []
    for place in (lambda t: t.clone(), lambda t: tensors.distribute_tensor(t.clone(), mesh, [tensors.Replicate()])):
        ps = [torch.nn.Parameter(place(w)) for w in weights]
        for p, g in zip(ps, grads, strict=True):
            p.grad = place(g)
        rule = load("muon", "update rule")([{"params": [(str(i), p) for i, p in enumerate(ps)], **HIDDEN}], lr=0.1)
        rule.step()
        found.append([local(p.detach()) for p in ps])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_adam_mini_takes_shards_of_whole_blocks(second_of_four: None) -> None:
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh = torch.distributed.init_device_mesh("cpu", (4,))

    def stepped(role: str, head_dim: int, placement: Any) -> tuple[int, ...]:
        p = torch.nn.Parameter(tensors.distribute_tensor(torch.randn(64, 12), mesh, [placement]))
        rule = AdamMini([{"params": [("w", p)], "role": role, "columns": False, "head_dim": head_dim}], lr=0.1)
        p.grad = tensors.distribute_tensor(torch.ones(64, 12), mesh, [placement])
        rule.step()
        return tuple(local(rule.state[p]["v"]).shape)

    assert stepped("v", 16, tensors.Shard(0)) == (16,)
    assert stepped("q", 16, tensors.Shard(0)) == (1,)
    for wrong in (("q", 32, tensors.Shard(0)), ("v", 16, tensors.Shard(1))):
        with pytest.raises(SkimpError, match="a function of the whole tensor"):
            stepped(*wrong)


def test_parts_at_block_borders_equal_the_whole_with_4_bit_states() -> None:
    n, cut = 1301, 768
    g = torch.randn(n)
    codes = [torch.randint(0, 256, (704,), dtype=torch.uint8) for _ in range(2)]
    maxima = [torch.rand(11) for _ in range(2)]
    whole = [torch.randn(n).to(torch.bfloat16), codes[0], maxima[0], codes[1], maxima[1]]
    parts = [t.clone() for t in whole]
    adamw4bit(whole[0], g, *whole[1:], *OPTIONS)
    for start, stop in ((0, cut), (cut, n)):
        numbers, bytes_ = slice(start, stop), slice(start // 2, -(-stop // 128) * 64)
        blocks = slice(start // 128, -(-stop // 128))
        p, m, m_max, v, v_max = (t[{n: numbers, 704: bytes_, 11: blocks}[t.numel()]] for t in parts)
        adamw4bit(p, g[numbers], m, m_max, v, v_max, *OPTIONS, start)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
