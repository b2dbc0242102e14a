from __future__ import annotations

from pathlib import Path

import pytest

from skimp.core.errors import SkimpError
from skimp.recipe import host, host_budget

KB = 1024


def machine(root: Path, available_kb: int = 8_000_000, own_kb: int = 200_000, cgroup: str = "") -> Path:
    files = {
        "proc/meminfo": f"MemTotal: 16000000 kB\nMemAvailable: {available_kb} kB\n",
        "proc/self/status": f"Name: python\nVmRSS:\t{own_kb} kB\n",
        "proc/self/cgroup": cgroup,
    }
    for name, text in files.items():
        put(root, name, text)
    return root


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_a_limit_it_is_what_is_free_plus_what_this_process_holds(tmp_path: Path) -> None:
    found = host_budget(machine(tmp_path))
    assert found.bytes == 8_200_000 * KB
    assert "available" in found.why


def test_cgroup_v2_limit_less_what_others_hold(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/job\n")
    group = "sys/fs/cgroup/job/"
    put(root, group + "memory.max", "2000000000\n")
    put(root, group + "memory.current", str(200_000 * KB + 300_000_000 + 50_000_000))
    put(root, group + "memory.stat", "anon 1\ninactive_file 50000000\n")
    found = host_budget(root)
    assert found.bytes == 1_700_000_000  # 300 MB of another process; the 50 MB of page cache can go
    assert "control group limit 2.00 GB" in found.why
    put(root, group + "memory.max", "max\n")
    assert host_budget(root).bytes == 8_200_000 * KB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/a/b\n")
    put(root, "sys/fs/cgroup/a/b/memory.max", "3000000000")
    put(root, "sys/fs/cgroup/a/memory.max", "1000000000")
    assert host_budget(root).bytes == 1_000_000_000


def test_cgroup_v1_and_its_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="5:cpu:/x\n4:memory:/x\n0::/\n")
    limit = "sys/fs/cgroup/memory/x/memory.limit_in_bytes"
    put(root, limit, "9223372036854771712")
    assert host_budget(root).bytes == 8_200_000 * KB
    put(root, limit, "1500000000")
    assert host_budget(root).bytes == 1_500_000_000


def test_a_container_sees_its_group_at_the_mount_root(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/docker/0123\n")
    put(root, "sys/fs/cgroup/memory.max", "1200000000")
    assert host_budget(root).bytes == 1_200_000_000


def test_a_limit_above_what_is_free_does_not_matter(tmp_path: Path) -> None:
    root = machine(tmp_path, available_kb=1_000_000, cgroup="0::/\n")
    put(root, "sys/fs/cgroup/memory.max", "99000000000")
    assert host_budget(root).bytes == 1_200_000 * KB


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_physical", lambda: None)
    with pytest.raises(SkimpError, match="host: 16GB"):
        host_budget(tmp_path)
    monkeypatch.setattr(host, "_physical", lambda: 5_000_000_000)
    assert host_budget(tmp_path).bytes == 5_000_000_000
