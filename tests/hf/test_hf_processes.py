"""Techniques attached under data parallelism and on an FSDP2 model: two gloo processes, equal to the plain trainer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install skimp[hf]")


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).with_name("two_processes.py"))
    children = [
        subprocess.Popen(
            [sys.executable, script, str(tmp_path / "found.pt")],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [child.communicate(timeout=500)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], "\n".join(texts)[-4000:]
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    plain, attached, coded = found["plain"], found["attached"], found["8-bit"]
    assert attached["losses"] == pytest.approx(plain["losses"], rel=5e-7)
    assert attached["norms"] == pytest.approx(plain["norms"], rel=5e-6)
    assert coded["losses"] == pytest.approx(plain["losses"], rel=2e-5)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(attached["weights"][name], weight, rtol=0, atol=3e-5)  # lr is 1e-3
    one, two = found["sharded"], found["sharded attached"]
    torch.testing.assert_close(two["loss"], one["loss"], rtol=5e-7, atol=0)
    for name, grad in one["grads"].items():
        torch.testing.assert_close(two["grads"][name], grad, rtol=0, atol=6e-6 * float(grad.abs().max()))
