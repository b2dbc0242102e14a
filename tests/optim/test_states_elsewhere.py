"""States on disk: the same bits from every rule, no resident memory, saved and read region by region."""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core.away import Away, region_bytes
from skimp.core.errors import EffectError
from skimp.core.memory.process import resident
from skimp.core.registry import load, methods
from skimp.core.state_file import StateFile
from skimp.core.state_host import HostStates, SimulatedHostStates
from skimp.optim import AdamW, AdamW8bit, elsewhere, reset_moments, role_groups, roles, state_key
from skimp.optim.base import UpdateRule

RULES = [name for name, f in methods().items() if f.kind == "update rule" and "state-offload" not in f.conflicts]

#: Ranks at which something is saved on matrices this small.
OPTIONS: dict[str, dict[str, Any]] = {"galore8bit": {"rank": 8}, "q-galore": {"rank": 8}}


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(65, 131), nn.LayerNorm(131), nn.Linear(131, 97, bias=False)).to(dtype)


def steps(rule: UpdateRule, net: nn.Module, first: int, count: int) -> None:
    for index in range(first, first + count):
        torch.manual_seed(100 + index)
        for p in net.parameters():
            rule.step_parameter(p, torch.randn_like(p))


def state(rule: UpdateRule) -> dict[str, Any]:
    return {state_key(n, k): v.clone() if isinstance(v, Tensor) else v for n, k, v in rule.named_state()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return set(one) == set(other) and all(
        torch.equal(v, other[k]) if isinstance(v, Tensor) else v == other[k] for k, v in one.items()
    )


def made(name: str, net: nn.Module) -> UpdateRule:
    groups = role_groups(net.named_parameters(), 0.01, roles(net))
    found: UpdateRule = load(name, "update rule")(groups, lr=1e-3, **OPTIONS.get(name, {}))
    return found


@pytest.mark.parametrize("name", RULES)
def test_every_rule_moves_to_the_same_bits(tmp_path: Path, name: str) -> None:
    dtype = torch.bfloat16 if name == "adamw-bf16" else torch.float32
    here, there = model(dtype=dtype), model(dtype=dtype)
    one, two = made(name, here), made(name, there)
    file = StateFile(tmp_path)
    two.keep_states(file)
    steps(one, here, 0, 3)
    steps(two, there, 0, 3)
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    assert same(state(one), state(two))
    if any(region_bytes(list(two.spec_of(p).values())) for p in there.parameters()):
        file.assert_effect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rule", [AdamW, AdamW8bit])
def test_states_go_away_and_come_back_between_steps(tmp_path: Path, rule: type[UpdateRule]) -> None:
    here, there = model(), model()
    one, two = rule(here.named_parameters()), rule(there.named_parameters())
    steps(one, here, 0, 4)
    steps(two, there, 0, 1)
    two.keep_states(StateFile(tmp_path))
    steps(two, there, 1, 1)
    two.keep_states(StateFile(tmp_path))  # to another file
    steps(two, there, 2, 1)
    two.keep_states(None)
    assert two.away is None
    steps(two, there, 3, 1)
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    assert same(state(one), state(two))


def test_what_was_saved_from_memory_is_read_onto_disk_and_back(tmp_path: Path) -> None:
    here, there, again = model(), model(), model()
    one, two, three = AdamW(here.named_parameters()), AdamW(there.named_parameters()), AdamW(again.named_parameters())
    steps(one, here, 0, 2)
    two.keep_states(StateFile(tmp_path))
    two.load_named_state(state(one))
    assert same(state(one), state(two))
    three.load_named_state(state(two))
    assert same(state(one), state(three))


def test_small_states_stay_in_memory(tmp_path: Path) -> None:
    net = model()
    rule = AdamW(net.named_parameters())
    file = StateFile(tmp_path)
    rule.keep_states(file)
    rule.init_states()
    away = {rule.name_of(p) for p in rule.parameters() if file.holds(rule.name_of(p))}
    assert away == {"0.weight", "2.weight"}
    assert file.nbytes == sum(region_bytes(list(rule.spec_of(net[i].weight).values())) for i in (0, 2))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc: resident pages cannot be counted")
def test_resident_memory_does_not_hold_the_states(tmp_path: Path) -> None:
    """16 parameters of 8 MB with 16 MB of state each: 256 MB that must not be in the process, 16 of them at a time."""
    gc.collect()
    size, count = 2_000_000, 16
    parameters = [(f"p{i}", nn.Parameter(torch.zeros(size))) for i in range(count)]
    rule = AdamW(parameters)
    rule.keep_states(StateFile(tmp_path))
    rule.init_states()
    grad = torch.ones(size)
    before, highest = resident(), 0
    for _ in range(2):
        for _, p in parameters:
            rule.step_parameter(p, grad)
            highest = max(highest, resident().files - before.files)
    assert highest <= 1 << 20
    assert resident().now - before.now < count * size * 4 + (32 << 20)  # the parameters themselves, touched now
    assert float(rule.state[parameters[3][1]]["v"][-1]) > 0


@pytest.fixture(params=[1, 2])
def thread_count(request: pytest.FixtureRequest) -> Any:
    """Kernels cut their work by threads: where must not matter."""
    old = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(old)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adamw-bf16", "lion"])
@pytest.mark.parametrize("tile", [1, 40_000, 100_000])
@pytest.mark.usefixtures("thread_count")
def test_an_update_in_tiles_of_any_size_is_the_same_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tile: int
) -> None:
    """Rows not a multiple of the tile; columns not one of the block; coded blocks are never cut in two."""
    monkeypatch.setattr(elsewhere, "TILE", tile)
    dtype = torch.bfloat16 if name == "adamw-bf16" else torch.float32
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(96, 341), nn.Linear(341, 50)).to(dtype)
    there = copy.deepcopy(here)
    one, two = made(name, here), made(name, there)
    file = StateFile(tmp_path)
    two.keep_states(file)
    steps(one, here, 0, 3)
    steps(two, there, 0, 3)
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    assert same(state(one), state(two))
    rows = elsewhere.rows_at_once(two, there[0].weight)
    assert (0 < rows < 341) or (tile == 100_000 and two.bytes_of(there[0].weight) <= tile)
    assert file.opened >= 3 * (1 if not rows else -(-341 // rows))
    assert all(elsewhere.any_nonzero(two, p, key) for p in there.parameters() for key in two.spec_of(p))


def test_what_is_updated_as_a_whole_is_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "TILE", 1)
    net = model()
    rule = made("muon", net)
    rule.keep_states(StateFile(tmp_path))
    assert all(elsewhere.rows_at_once(rule, p) == 0 for p in net.parameters() if rule.locality_of(p) == "matrix")


def test_a_region_that_was_given_back_is_zeros_again(tmp_path: Path) -> None:
    net = model()
    rule = AdamW(net.named_parameters())
    file = StateFile(tmp_path)
    rule.keep_states(file)
    steps(rule, net, 0, 1)
    size = file._used
    rule.state.pop(net[0].weight)
    again = rule.init_state(net[0].weight)
    assert again["step"] == 0
    assert not again["m"].any()
    assert file._used == size


def test_a_full_disk_is_seen_before_any_state_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    net = model()
    rule, file = AdamW(net.named_parameters()), StateFile(tmp_path)
    with pytest.raises(OSError, match="No space left") as caught:
        rule.keep_states(file)
    assert caught.value.filename == str(tmp_path)
    assert rule.away is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._file)


def test_states_that_never_left_fail_the_effect(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    with pytest.raises(EffectError, match="all of them are in memory"):
        file.assert_effect()


def test_a_simulated_place_counts_what_a_file_takes(tmp_path: Path) -> None:
    net = model()
    counts = []
    for away in (StateFile(tmp_path), Away()):
        rule = AdamW(net.named_parameters())
        rule.keep_states(away)
        rule.init_states()
        counts.append((away.nbytes, away.largest))
    assert counts[0] == counts[1]


def host() -> HostStates:
    """Ordinary memory in the place of pinned memory: the same copies, on a machine without a card."""
    return HostStates(lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype))


@pytest.mark.parametrize("name", RULES)
def test_an_update_beside_the_states_is_the_same_to_the_bit(name: str) -> None:
    dtype = torch.bfloat16 if name == "adamw-bf16" else torch.float32
    here, there = model(dtype=dtype), model(dtype=dtype)
    one, two = made(name, here), made(name, there)
    two.keep_states(host())
    steps(one, here, 0, 3)
    steps(two, there, 0, 3)
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    assert same(state(one), state(two))


def test_weights_that_others_wrote_are_not_overwritten_by_the_hosts_copy() -> None:
    here, there = model(), model()
    one, two = AdamW(here.named_parameters()), AdamW(there.named_parameters())
    two.keep_states(host())
    for rule, net in ((one, here), (two, there)):
        steps(rule, net, 0, 1)
        with torch.no_grad():
            net[0].weight.mul_(0.5)  # a checkpoint read back
        steps(rule, net, 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))


def test_the_host_holds_states_a_copy_of_each_parameter_and_one_gradient() -> None:
    net = model()
    counts = []
    for away in (host(), SimulatedHostStates()):
        rule = AdamW(net.named_parameters())
        rule.keep_states(away)
        rule.init_states()
        counts.append(away.nbytes)
    moved = [net[0].weight, net[2].weight]
    states = sum(region_bytes([((p.numel(),), torch.float32)] * 2) for p in moved)
    assert counts == [states + sum(p.nbytes for p in moved) + max(p.nbytes for p in moved)] * 2


def test_regions_begin_and_end_with_the_machines_pages(tmp_path: Path) -> None:
    """Advice to the kernel on part of a page is an error, whatever the size of a page is here."""
    file = StateFile(tmp_path)
    asked: list[tuple[int, int]] = []

    class Watched:
        def madvise(self, advice: int, start: int, length: int) -> None:
            asked.append((start, length))

    rule = AdamW(model().named_parameters())
    rule.keep_states(file)
    rule.init_states()
    file._map = Watched()  # type: ignore[assignment]
    for name in file._spans:
        with file.open(name):
            pass
    assert len(asked) >= 2 * len(file._spans) > 2
    assert all(start % mmap.PAGESIZE == 0 for start, _ in asked)
    assert all(start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0 for start, size in file._spans.values())


@pytest.mark.parametrize("name", ["dion", "adamw8bit"])
def test_a_reset_and_a_first_state_leave_nothing_open(tmp_path: Path, name: str) -> None:
    """Whatever is read or written of a state on disk is inside its region, which is then given back."""
    net, twin = model(), model()
    rule, other = made(name, net), made(name, twin)
    file = StateFile(tmp_path)
    rule.keep_states(file)
    rule.init_states()
    opened = file.opened
    assert opened == (2 if name == "dion" else 0)  # Dion's Q begins with numbers
    steps(rule, net, 0, 2)
    steps(other, twin, 0, 2)
    before = file.opened
    assert reset_moments(rule) == reset_moments(other) > 0
    assert file.opened == before + 2
    assert same(state(rule), state(other))
