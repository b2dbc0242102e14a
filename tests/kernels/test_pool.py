"""The tensor pool in a process of its own: limits hold, blocks come back, bits stay, torch's events are told."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from skimp.core.errors import SkimpError
from skimp.kernels.native import pool

needs_pool = pytest.mark.skipif(not pool.available(), reason=pool.why())

HEAD = """
import gc, json, torch
from dataclasses import asdict
from skimp.kernels.native import pool
"""


def child(code: str) -> Any:
    """Run `code`, which prints JSON, in a fresh Python: the allocator of this one stays torch's."""
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_pool
def test_a_freed_block_serves_the_next_tensor_of_its_size() -> None:
    found = child("""
pool.install(100 << 20)
first = torch.empty(1 << 20)
place = first.data_ptr()
del first
second = torch.empty((1 << 20) - 3)
print(json.dumps([second.data_ptr() == place, asdict(pool.statistics())]))
""")
    same, told = found
    assert same
    assert (told["mapped"], told["reused"], told["live"], told["waiting"]) == (1, 1, 4 << 20, 0)


@needs_pool
def test_waiting_and_live_blocks_stay_within_the_limit_and_the_system_gets_the_rest() -> None:
    found = child("""
from skimp.core.memory.process import resident
pool.install(64 << 20)
before = resident().now
tensors = [torch.ones(n << 18) for n in range(1, 9)]      # 1 to 8 MiB: 36 MiB
full = asdict(pool.statistics())
tensors.clear()
kept = asdict(pool.statistics())
large = torch.ones(60 << 18)                               # 60 MiB: most of what waits has to go
over = asdict(pool.statistics())
more = torch.ones(60 << 18)                                # live bytes alone may exceed the limit; nothing waits
beyond, held = asdict(pool.statistics()), resident().now - before
del large, more
pool.set_limit(0)
print(json.dumps([full, kept, over, beyond, asdict(pool.statistics()), held, resident().now - before]))
""")
    full, kept, over, beyond, end, held, left = found
    mib = 1 << 20
    assert (full["live"], full["waiting"]) == (36 * mib, 0)
    assert (kept["live"], kept["waiting"]) == (0, 36 * mib)
    assert over["live"] == 60 * mib
    assert over["waiting"] <= 4 * mib
    assert (beyond["live"], beyond["waiting"]) == (120 * mib, 0)
    assert (end["live"], end["waiting"]) == (0, 0)
    assert held == pytest.approx(120 * mib, abs=8 * mib)
    assert left < 8 * mib


@needs_pool
def test_training_is_the_same_to_the_bit_and_remove_gives_torch_its_own_allocator_back() -> None:
    found = child("""
def train():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(513, 700), torch.nn.GELU(), torch.nn.Linear(700, 513))
    rule = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    x = torch.randn(200, 513)
    for step in range(5):
        loss = (layers(x * (step + 1)) - x).square().mean()
        loss.backward()
        rule.step()
        rule.zero_grad()
    return [p.detach().clone() for p in layers.parameters()]
plain = train()
pool.install(50 << 20)
pooled = train()
used = pool.statistics().reused
pool.remove()
again, mapped = train(), pool.statistics().mapped
same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, pooled, again))
train()
print(json.dumps([same, used, pool.statistics().mapped - mapped]))
""")
    same, used, mapped_after = found
    assert same
    assert used > 20
    assert mapped_after == 0


@needs_pool
def test_the_profiler_sees_the_same_events() -> None:
    found = child("""
from skimp.core.memory.oracle import witness
def work():
    x = torch.ones(1 << 18)
    y = x * 2
    del x
    return float((y + 1)[0])
def told():
    seen = witness(work)[1]
    return {k: v for k, v in vars(seen).items() if isinstance(v, int)}
plain = told()
pool.install(1 << 30)
print(json.dumps([plain, told()]))
""")
    plain, pooled = found
    assert plain
    assert pooled == plain


@needs_pool
def test_no_memory_is_an_error_and_the_pool_goes_on() -> None:
    found = child("""
import resource
pool.install(1 << 30)
waits = torch.ones(32 << 18)
del waits
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + (8 << 20),) * 2)
try:
    torch.empty(1 << 33)
    said = "nothing"
except RuntimeError as error:
    said = str(error)
after = asdict(pool.statistics())
ok = float(torch.ones(1 << 18).sum())
print(json.dumps([said, after, ok]))
""")
    said, after, total = found
    assert "can't allocate memory" in said
    assert after["waiting"] == 0, "what waited was given to the system before it was asked again"
    assert total == 1 << 18


def test_a_library_of_another_torch_or_none_is_refused(tmp_path, monkeypatch) -> None:
    assert "not built" in pool.open_pool(tmp_path / "none.so")[1]
    if pool.compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(pool, "stamp", lambda: "0123")
    target = pool.build(tmp_path / "other.so")
    monkeypatch.undo()
    assert "another torch" in pool.open_pool(target)[1]
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        with pytest.raises(SkimpError, match=r"g\+\+"):
            pool.build(tmp_path / "third.so")


@needs_pool
def test_the_smallest_tensor_of_the_pool_is_the_stated_one() -> None:
    live = child("""
pool.install(64 << 20)
below = torch.empty(pool.SMALLEST - 1, dtype=torch.uint8)
without = pool.statistics().live
at = torch.empty(pool.SMALLEST, dtype=torch.uint8)
print(json.dumps([without, pool.statistics().live]))
""")
    assert live == [0, pool.SMALLEST]
