"""The Triton forms against the same table, through Triton's interpreter on a CPU.

The interpreter has to be asked for before triton is imported, so the rows run in a process of their own; what it says
is read back row by row. On a card, `benchmarks/gpu_kernels.py` runs the same table.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from forms_table import CASES, Case

from skimp.core.errors import SkimpError
from skimp.kernels.forms import FORMS, kernel

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ROWS = """
import json, sys, traceback
import torch
from forms_table import CASES, compare
found = {}
for case in [c for c in CASES if c.quick == (sys.argv[1] == "quick")]:
    for dtype in (torch.float32, torch.bfloat16) if case.halves else (torch.float32,):
        try:
            compare(case, "triton", dtype)
            said = ""
        except Exception:
            said = traceback.format_exc()
        found[f"{case} {dtype}"] = said
json.dump(found, sys.stdout)
"""

SPARSE = """
import torch
from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.sparse_attention import sparse_attention_reference
from skimp.kernels.triton.sparse import sparse_attention
for heads, kv, seq, dim, pattern in (
    (4, 2, 43, 16, BlockPattern(2, 16, 1, 2)), (2, 2, 40, 32, BlockPattern(2, 16, 1, 3, offset=1, dense_heads=1)),
):
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(2, h, seq, dim, generator=g) for h in (heads, kv, kv)]
    a, b = [t.clone().requires_grad_() for t in given], [t.double().requires_grad_() for t in given]
    y, z = sparse_attention(*a, pattern), sparse_attention_reference(*b, pattern)
    up = torch.randn(y.shape, generator=g)
    found, wanted = torch.autograd.grad(y, a, up), torch.autograd.grad(z, b, up.double())
    for one, other in zip((y, *found), (z, *wanted), strict=True):
        assert (one.detach().double() - other).abs().max() < 2e-6 * other.abs().max()
print("right")
"""


@cache
def found(quick: bool) -> dict[str, str]:
    """What each row says: nothing when it is right."""
    return dict(json.loads(interpreted(ROWS, "quick" if quick else "rest")))


def interpreted(code: str, *words: str) -> str:
    """What a process with Triton's interpreter prints."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check(case: Case) -> None:
    rows = {name: said for name, said in found(case.quick).items() if name.startswith(f"{case} ")}
    assert len(rows) == 1 + case.halves
    assert not any(rows.values()), "\n".join(rows.values())


def test_every_kernel_has_a_quick_row() -> None:
    assert {case.name for case in CASES if case.quick} == set(FORMS)


@needs_triton
@pytest.mark.parametrize("case", [c for c in CASES if c.quick], ids=str)
def test_triton_values_and_gradients(case: Case) -> None:
    check(case)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("case", [c for c in CASES if not c.quick], ids=str)
def test_triton_values_and_gradients_of_the_whole_table(case: Case) -> None:
    check(case)


@needs_triton
def test_block_sparse_attention_in_triton_is_masked_attention() -> None:
    assert interpreted(SPARSE).strip() == "right"


def test_triton_is_imported_by_its_own_forms_alone() -> None:
    code = "import sys, skimp.kernels.forms as f\nfor n in f.FORMS: f.kernel(n, 'native'); f.kernel(n, 'reference')"
    code += "\nprint([m for m in sys.modules if m.startswith('skimp.kernels.triton')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_triton_its_form_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in [m for m in sys.modules if m.startswith("skimp.kernels.triton.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SkimpError, match=r"skimp\[triton\]"):
        kernel("rms_norm", "triton")
