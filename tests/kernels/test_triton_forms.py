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


@cache
def found(quick: bool) -> dict[str, str]:
    """What each row says: nothing when it is right."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", ROWS, "quick" if quick else "rest"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


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
