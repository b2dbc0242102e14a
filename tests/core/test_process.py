"""The malloc policy takes effect in a fresh process; resident memory is read, not guessed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skimp.core.memory.process import resident

CODE = """
import sys, torch
from skimp.core.memory.process import malloc_policy, resident, set_malloc_policy, trim
assert malloc_policy() is None
assert set_malloc_policy(sys.argv[1]) and malloc_policy() == sys.argv[1]
kept = [torch.ones(1 << 19) for _ in range(101)]      # 2 MiB each
full = resident().now
last = kept.pop()                                     # on a heap this one holds the top down
kept.clear()
print(full - resident().now)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's policy is a Linux matter")
@pytest.mark.parametrize(("policy", "returned"), [("return", True), ("reuse", False)])
def test_freed_tensors_are_returned_or_kept(policy: str, returned: bool) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, policy], capture_output=True, text=True, check=True)
    freed = int(done.stdout)
    # 100 tensors of 2 MiB: all of them go back under "return", less than a tenth under "reuse".
    assert (freed > 0.95 * 100 * 2**21) if returned else (freed < 0.1 * 100 * 2**21)


def test_resident_peak_is_at_least_now() -> None:
    found = resident()
    assert found.peak >= found.now > 10_000_000
