"""The fault table: every way a run can be struck, what it did, and whether anything was lost.

    python benchmarks/faults.py                       # some ten minutes; mostly starting processes
    python benchmarks/faults.py --only memory,disk    # rows whose name holds one of these words

Each row strikes a run of its own and resumes it where it had to end. The oracle is one run that was left alone: after
the fault the weights and optimizer states must be its bits (or, where a smaller plan forms sums in another order, its
losses to rounding), every step must be in the metrics once, and the run must have gone on from the newest checkpoint
that was complete when it was struck, or from the very step. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
from kills import PATIENCE_SECONDS, TINY, Subject, write_model

STEPS, SEQ = 8, 128
FREE = {"exact": {"in_backward": False, "loss_chunk": 256}}
RETURN = {"exact": {"in_backward": False, "loss_chunk": 256, "malloc": "return"}}
#: Activations of some 100 MB, so that there is something to give back.
WIDE = {**FREE, "train": {"batch_tokens": 64 * SEQ}}
#: What all blocks keep is on disk; left to the planner it would be in memory.
ON_DISK = {"exact": {"micro_batch": 4, "recompute": 1, "loss_chunk": 256, "in_backward": False,
    "offload": {"activations": "disk", "blocks": "all", "optimizer": "none"}}}  # fmt: skip
#: More than a checkpoint's largest file, less than what blocks keep.
TIER_LIMIT = 2_000_000
#: Parameters move while gradients still come.
MOVING = {"exact": {"micro_batch": 8, "recompute": 1, "in_backward": True, "loss_chunk": 256}}

#: Trains with a voice that takes memory nobody planned for after the third step, as a library might.
BALLAST = """
import json, sys
import skimp.api
from skimp.core.errors import SkimpError
from skimp.core.memory.process import set_malloc_policy
from skimp.core.memory.room import Room
from skimp.run.voice import Voice

set_malloc_policy()
recipe, size, spare, held = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), []
budget = skimp.api.plan(recipe).peak_bytes + spare if spare else None

class Taking(Voice):
    def step(self, progress):
        if progress.step == 3:  # a negative size leaves so much of what there is
            held.append(b"x" * (size if size > 0 else Room().left().bytes + size))
    def say(self, text):
        print(text, flush=True)

try:
    skimp.api.train(recipe, voice=Taking(), budget=budget)
except SkimpError as error:
    print("skimp: " + error.message())
    sys.exit(error.exit_code)
"""


class Struck(Subject):
    """A run with changes to its recipe; remembers what all its processes said."""

    def __init__(self, work: Path, name: str, changes: Mapping[str, Any], optimizer: str) -> None:
        super().__init__(work, name, STEPS, SEQ, optimizer)
        self.values = {**json.loads(self.recipe.read_text()), **changes}
        self.values["train"] = {**self.values["train"], **changes.get("train", {})}
        self.recipe.write_text(json.dumps(self.values))
        self.said = ""

    def go(
        self,
        env: Mapping[str, str] | None = None,
        during: Callable[[subprocess.Popen[bytes]], None] | None = None,
        argv: list[str] | None = None,
        **options: Any,
    ) -> int:
        """Start or resume, let `during` act on the process, and return its exit code."""
        with self.log.open("wb") as out:
            process = subprocess.Popen(
                argv or [word for word in self.command() if word != "--quiet"], stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})}, cwd=measure.ROOT, **options,
            )  # fmt: skip
            try:
                if during is not None:
                    during(process)
                return process.wait(PATIENCE_SECONDS)
            finally:
                process.kill()
                process.wait()
                self.said += self.log.read_text("utf-8", "replace")

    def wait_for(self, process: subprocess.Popen[bytes], step: int) -> None:
        while process.poll() is None and self.last_step() < step:
            time.sleep(0.002)


@dataclass(frozen=True)
class Fault:
    """One row.

    name: the fault. strike: does it, returns the exit codes of the processes that met it. changes: to the recipe.
    exact: the end must be the oracle's bits, else its losses to rounding. says: words that must have been said.
    codes: the exit codes that are right. back: how many complete checkpoints were spoiled by the fault itself.
    """

    name: str
    strike: Callable[[Struck], list[int]]
    says: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0,)
    changes: Mapping[str, Any] | None = None
    exact: bool = True
    back: int = 0


def injected(point: str) -> Callable[[Struck], list[int]]:
    return lambda run: [run.go({"SKIMP_FAULT": point})]


def signalled(number: signal.Signals) -> Callable[[Struck], list[int]]:
    def strike(run: Struck) -> list[int]:
        def send(process: subprocess.Popen[bytes]) -> None:
            run.wait_for(process, 3)
            process.send_signal(number)

        return [run.go(during=send)]

    return strike


def stopped_then(harm: Callable[[Path], None]) -> Callable[[Struck], list[int]]:
    """Stop at a checkpoint and harm it."""

    def strike(run: Struck) -> list[int]:
        code = run.go({"SKIMP_FAULT": "after_mark:2"})
        newest = run.newest()
        assert newest is not None
        harm(newest)
        return [code]

    return strike


def flip(checkpoint: Path) -> None:
    path = checkpoint / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def halve(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", (checkpoint / "model.safetensors").stat().st_size // 2)


def disk_full(run: Struck) -> list[int]:
    first = run.go({"SKIMP_FAULT": "after_mark:1"})
    newest = run.newest()
    assert newest is not None
    most = (newest / "model.safetensors").stat().st_size // 2
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    return [first, run.go(preexec_fn=limit)]


def tier_full(run: Struck) -> list[int]:
    """No file may grow beyond what a checkpoint takes: activations on disk do, in the first step."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (TIER_LIMIT, TIER_LIMIT))
    return [run.go(preexec_fn=limit)]


def elsewhere(**env: str) -> Callable[[Struck], list[int]]:
    """Stop, and resume under another environment; then stop again, so that the rest runs under the first."""

    def strike(run: Struck) -> list[int]:
        return [run.go({"SKIMP_FAULT": "after_mark:1"}), run.go({"SKIMP_FAULT": "before_write:1", **env})]

    return strike


def address_space(run: Struck) -> list[int]:
    """Take the address space away while it trains: what it has between two steps, and 10 MB."""

    def limit(process: subprocess.Popen[bytes]) -> None:
        run.wait_for(process, 2)
        least = 1 << 60
        while process.poll() is None and run.last_step() < 3:
            least = min(least, measure._status(process.pid, "VmSize") or least)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_AS, (least + 10_000_000, resource.RLIM_INFINITY))

    return [run.go(during=limit)]


def ballast(size: int, spare: int) -> Callable[[Struck], list[int]]:
    """`size` bytes that no plan knows of, with a budget of what is planned and `spare`."""
    return lambda run: [run.go(argv=[sys.executable, "-c", BALLAST, json.dumps(run.values), str(size), str(spare)])]


def control_group(run: Struck) -> list[int]:
    """A memory control group of its own, and ballast that nearly fills it: the kernel would kill.

    Raises:
        PermissionError: no control group may be made here.
    """
    group = Path("/sys/fs/cgroup/memory") / f"skimp-faults-{os.getpid()}"
    if not (group.parent / "memory.limit_in_bytes").exists():
        raise PermissionError("a memory control group of its own")
    group.mkdir()
    try:
        planned = json.loads((run.folder.parent / "alone" / "plan.json").read_text())["peak_bytes"]
        limit = planned + 200_000_000
        (group / "memory.limit_in_bytes").write_text(str(limit))
        enter = lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
        words = [sys.executable, "-c", BALLAST, json.dumps(run.values), str(-20_000_000), "0"]
        return [run.go(argv=words, preexec_fn=enter)]
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


CONTINUE = ("--resume",)
AGAIN = "the step is taken again"
KILLED = (-signal.SIGKILL,)
FAULTS = [
    *(
        Fault(f"killed in a save: {point}", injected(point), codes=KILLED)
        for point in ("mid_tensor:130", "before_fsync:3", "before_rename:2", "mid_mark:2", "prune:1")
    ),
    *(
        Fault(f"killed in a step: {point}", injected(point), codes=KILLED)
        for point in ("forward:9", "backward:9", "update:4")
    ),
    Fault("SIGTERM", signalled(signal.SIGTERM), CONTINUE, (143,)),
    Fault("Ctrl-C", signalled(signal.SIGINT), CONTINUE, (130,)),
    Fault("disk full in a save", disk_full, ("last good checkpoint is intact", "free "), (-signal.SIGKILL, 2)),
    Fault(
        "disk full under activations",
        tier_full,
        ("File too large", AGAIN, "with micro-batch 4"),
        changes=ON_DISK,
    ),
    Fault("killed with activations on disk", injected("backward:9"), codes=KILLED, changes=ON_DISK),
    Fault(
        "another number of threads at the resume",
        elsewhere(OMP_NUM_THREADS="3"),
        ("threads was", "not bit-equal"),
        (-signal.SIGKILL, -signal.SIGKILL),
    ),
    Fault(
        "another CPU capability at the resume",
        elsewhere(ATEN_CPU_CAPABILITY="default"),
        ("cpu_capability was",),
        (-signal.SIGKILL, -signal.SIGKILL),
    ),
    Fault("checkpoint half written", stopped_then(halve), ("passed over",), KILLED, back=1),
    Fault("checkpoint: one bit changed", stopped_then(flip), ("set aside as damaged-",), KILLED, back=1),
    Fault("memory refused in forward", injected("forward:9:memory"), (AGAIN,)),
    Fault("memory refused in backward", injected("backward:9:memory"), (AGAIN,)),
    Fault("memory refused in the updates", injected("update:4:memory"), ("went back to step-00000002",)),
    Fault("memory refused in the first updates", injected("update:1:memory"), ("went back to the beginning",)),
    Fault("in backward: memory refused in forward", injected("forward:9:memory"), (AGAIN,), changes=MOVING),
    Fault(
        "in backward: memory refused in the updating pass",
        injected("backward:10:memory"),
        ("went back to step-00000004",),
        changes=MOVING,
    ),
    Fault(
        "memory refused, planner free",
        injected("backward:6:memory"),
        (AGAIN, "with micro-batch"),
        changes=FREE,
        exact=False,
    ),
    Fault(
        "memory refused for ever", injected("backward:9+:memory"), ("no smaller plan", "is saved; continue"), codes=(3,)
    ),
    Fault("address space limited while training", address_space, ("were refused",), changes=RETURN, exact=False),
    Fault(
        "above its budget",
        ballast(150_000_000, 20_000_000),
        ("above its budget", "saved, and went on with micro-batch"),
        changes=WIDE,
        exact=False,
    ),
    Fault(
        "above its budget, nothing smaller",
        ballast(400_000_000, 20_000_000),
        ("above its budget", "is saved; continue"),
        codes=(3,),
    ),
    Fault(
        "control group nearly full", control_group, ("are left in the control group", "is saved; continue"), codes=(3,)
    ),
]


def strike(fault: Fault, work: Path, index: int, alone: Struck, optimizer: str) -> tuple[list[str], bool]:
    """One row of the table, and whether all is right."""
    run = Struck(work, f"fault-{index}", fault.changes or {}, optimizer)
    try:
        codes = fault.strike(run)
    except PermissionError as error:
        return [fault.name, "not struck", f"needs {error}", "", "", ""], True
    newest = run.newest_step()
    reached = run.last_step()
    resumed = 0 in codes or run.go() == 0
    marks = [line for line in run.said.splitlines() if line.startswith("resumed from")]
    went_on = int(marks[-1].rpartition("step ")[2].split()[0]) if marks else (0 if 0 not in codes else reached)
    # A fault that spoils a checkpoint costs the steps since the one before it, two here.
    lost = 0 if 0 in codes else max(0, newest - 2 * fault.back - went_on)
    mine, other = run.metrics(), alone.metrics()
    once = [row["step"] for row in mine] == list(range(1, STEPS + 1))
    if fault.exact:
        same = bool(alone.bits()) and run.bits() == alone.bits()
        end = "bit-equal" if same else "OTHER BITS"
    else:
        gap = max((abs(a["loss"] / b["loss"] - 1) for a, b in zip(mine, other, strict=False)), default=1.0)
        same = gap < 1e-3
        end = f"losses to {gap:.0e}"
    silent = [words for words in fault.says if words not in run.said]
    right = resumed and once and same and not silent and lost == 0 and tuple(codes) == fault.codes
    right = right and "Traceback" not in run.said
    said = "yes" if not silent else f"NOT {silent}"
    if not right:
        print(f"--- {fault.name}: exit codes {codes}\n{run.said[-3000:]}\n---", file=sys.stderr)
    struck = f"step {reached}, exit {', '.join(map(str, codes))}"
    return [fault.name, struck, "itself" if 0 in codes else f"step {went_on}", str(lost), end, said], right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds one of these words, by comma")
    parser.add_argument("--optimizer", default="adamw8bit", help="update rule, such as adamw")
    parser.add_argument("--work", default="runs/bench-faults", help="folder; an earlier benchmark's is removed")
    parser.add_argument("--json", help="write the rows here as well")
    args = parser.parse_args()
    work = Path(args.work).resolve()
    shutil.rmtree(work, ignore_errors=True)
    write_model(work / "model", TINY)
    words = [word for word in args.only.split(",") if word]
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    oracles = {}
    for name, changes in (("alone", {}), ("alone-wide", WIDE), ("alone-moving", MOVING)):
        if name == "alone" or any(fault.changes is changes for fault in chosen):
            oracles[name] = Struck(work, name, changes, args.optimizer)
            if code := oracles[name].go():
                sys.exit(f"the run that was left alone ended with exit code {code}:\n{oracles[name].said[-2000:]}")
    begin, rows, good = time.monotonic(), [], True
    for index, fault in enumerate(chosen):
        alone = oracles[{id(WIDE): "alone-wide", id(MOVING): "alone-moving"}.get(id(fault.changes), "alone")]
        row, right = strike(fault, work, index, alone, args.optimizer)
        rows.append([*row, "yes" if right else "NO"])
        good = good and right
        print(f"{index + 1} of {len(chosen)}: {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
    head = ["fault", "struck at", "went on from", "steps lost beyond the last checkpoint", "end", "says", "right"]
    print(
        f"{STEPS} steps of 8 x {SEQ} tokens, {args.optimizer}, saved every 2; {time.monotonic() - begin:.0f} s in all"
    )
    print(f"{measure.machine()}\n\n{measure.table(head, rows)}")
    measure.write_json(args.json, {"head": head, "rows": rows, "machine": measure.machine()})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
