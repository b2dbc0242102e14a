"""SIGKILL at every place in a save where it hurts, every time the place is reached: a complete one always
remains.

One child process imports torch and forks a saver for each case; a saver saves steps 1 to 3 (and step 3
again, as a resumed run does) and dies by SKIMP_FAULT, just as it would by the kernel's hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from skimp.core.errors import SkimpError
from skimp.run import faults
from skimp.run.checkpoint import latest, load, save
from skimp.run.checkpoint_folder import recover

SAVER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint_kill import save_all
from skimp.run.faults import POINTS

out = Path(sys.argv[1])
for point in POINTS:
    for hit in range(1, 100):
        root = out / f"{point}-{hit}"
        root.mkdir(parents=True)
        child = os.fork()
        if child == 0:
            os.environ["SKIMP_FAULT"] = f"{point}:{hit}"
            try:
                save_all(root)
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):  # survived: this point is reached fewer than `hit` times
            (root / "survived").write_text(str(os.WEXITSTATUS(status)))
            break
        (root / "killed").write_text(str(os.WTERMSIG(status)))
"""


def state(step: int) -> dict[str, list[tuple[str, torch.Tensor]]]:
    g = torch.Generator().manual_seed(step)
    table = torch.randn(11, 3, generator=g)
    packed = torch.randint(0, 256, (33,), generator=g, dtype=torch.uint8)
    return {
        "model": [("embed", table), ("head", table), ("norm", torch.randn(3, generator=g).bfloat16())],
        "optimizer": [("embed/m", packed), ("embed/step", torch.tensor(step))],
    }


def save_all(root: Path) -> None:
    """Steps 1, 2, 3 and 3 again, keeping one; each finished save is noted where no death takes it back."""
    for step in (1, 2, 3, 3):
        save(root / "checkpoints", step, state(step), {"step": step}, keep=1)
        with open(root / "done", "a") as file:
            file.write(f"{step}\n")


def holds(path: Path, step: int) -> bool:
    with load(path) as back:
        for group, entries in state(step).items():
            targets = [(name, torch.empty_like(tensor)) for name, tensor in entries]
            back.read_all(group, targets)
            if not all(torch.equal(got, want) for (_, got), (_, want) in zip(targets, entries, strict=True)):
                return False
        return back.step == step and back.meta == {"step": step}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("killed")
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SAVER, str(out), here],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("point", faults.POINTS)
def test_after_a_kill_at_every_hit_of(point: str, killed: Path) -> None:
    cases = sorted(killed.glob(f"{point}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    *deaths, survivor = cases
    # At least once in each of the four saves; pruning begins with the second.
    assert len(deaths) >= (3 if point == "prune" else 4)
    assert (survivor / "survived").read_text() == "0"
    assert holds(latest(survivor / "checkpoints"), 3)
    for case in deaths:
        assert (case / "killed").read_text() == str(int(signal.SIGKILL))
        done = (case / "done").read_text().split() if (case / "done").exists() else []
        acknowledged = int(done[-1]) if done else 0
        root = case / "checkpoints"
        found = latest(root)
        if found is None:
            assert acknowledged == 0, case.name
        else:
            step = load(found).step
            # What save() returned for is never lost; at most the one it was about to return for is there too.
            assert step in (acknowledged, min(acknowledged + 1, 3)), case.name
            assert holds(found, step), case.name
        # Going on: the next save works, and clears away whatever the dead one left.
        save(root, 4, state(4), {"step": 4}, keep=1)
        assert holds(latest(root), 4)
        assert [path.name for path in root.iterdir()] == ["step-00000004"], case.name


@pytest.mark.parametrize("point", ["after_rename", "before_mark", "mid_mark"])
def test_the_earlier_version_counts_until_its_replacement_is_marked(tmp_path: Path, point: str) -> None:
    """Between the renames and the mark of a re-save the old version has another name, and is found there."""
    save(tmp_path, 3, state(3), {"step": 3}, keep=1)
    child = os.fork()
    if child == 0:
        os.environ["SKIMP_FAULT"] = f"{point}:1"
        faults._hits = 0
        try:
            save(tmp_path, 3, {"model": [("w", torch.zeros(1))]}, {}, keep=1)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert latest(tmp_path) == tmp_path / f"step-00000003.old-{child}"
    assert holds(latest(tmp_path), 3)
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert holds(latest(tmp_path), 3)


def test_a_misspelt_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("before_wrte:1", "before_write", "before_write:0", "before_write:x"):
        monkeypatch.setenv("SKIMP_FAULT", text)
        with pytest.raises(SkimpError, match="SKIMP_FAULT"):
            faults.reach("mid_mark")


def test_leftovers_of_a_living_process_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1), {}, keep=1)
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    theirs = tmp_path / f"step-00000007.tmp-{other.pid}"
    theirs.mkdir()
    save(tmp_path, 2, state(2), {}, keep=1)
    assert theirs.exists()
    other.communicate()
    save(tmp_path, 3, state(3), {}, keep=1)
    assert not theirs.exists()
    assert json.loads((latest(tmp_path) / "COMPLETE").read_text())["step"] == 3
