"""What every benchmark needs: a child process watched from outside, results that outlive a kill, a
table, the machine.

Nothing heavy is imported here. A child inherits no memory but the system's own mark of its parent's size at
the fork, so a parent with torch in it would set a floor of 300 MB under every figure.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Child:
    """A finished child: exit code (negative: signal), wall seconds, highest resident bytes, what it
    printed.
    """

    code: int
    seconds: float
    peak: int
    out: str

    def check(self, what: str) -> Child:
        """Itself, or an exit that shows the end of what the child printed."""
        if self.code != 0:
            sys.exit(f"{what}: exit code {self.code}\n{self.out[-3000:]}")
        return self


def skimp(*words: str) -> list[str]:
    """The command line of `skimp WORDS` in this interpreter."""
    return [sys.executable, "-m", "skimp.cli.main", *words]


def watch(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Child:
    """Run a child to its end.

    The peak is the larger of two: the system's mark VmHWM, read every 10 ms, because the child may set it
    back (`skimp train` does so after planning, and planning counts too); and what the system reports at its
    death.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, cwd=ROOT
        )
        peak = 0
        try:
            while True:
                done, status, usage = os.wait4(process.pid, os.WNOHANG)
                if done:
                    break
                peak = max(peak, high_water(process.pid))
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    last = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    # Between fork and exec a child is its parent to the system: a mark no higher than ours says nothing
    # about it.
    peak = max(peak, last) if last > high_water() else peak
    return Child(process.returncode, seconds, peak, log.read_text("utf-8", "replace"))


def high_water(pid: int | str = "self") -> int:
    """Highest resident bytes of a process so far (VmHWM); 0 when it is gone or the system has no /proc."""
    return _status(pid, "VmHWM")


def resident(pid: int | str = "self") -> int:
    """Resident bytes of a process now (VmRSS)."""
    return _status(pid, "VmRSS")


def _status(pid: int | str, key: str) -> int:
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines,
    ):
        for line in lines:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


class Results:
    """Finished rows by key, in a JSON file that is always whole: a killed benchmark goes on where it was."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self.rows: dict[str, Any] = {}
        if path.is_file() and not fresh:
            self.rows = json.loads(path.read_text("utf-8"))

    def get(self, key: Any) -> Any:
        """The stored row of a key (plain values), or None."""
        return self.rows.get(digest(key))

    def put(self, key: Any, row: Any) -> Any:
        """Store a row and return it."""
        self.rows[digest(key)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_name(self.path.name + ".tmp")
        aside.write_text(json.dumps(self.rows, indent=1), "utf-8")
        os.replace(aside, self.path)
        return row

    def row(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """The stored row of a key; else `make`'s, said to begin and stored."""
        found = self.get(key)
        if found is None:
            print(f"{name} …", file=sys.stderr, flush=True)
            found = self.put(key, make())
        return found


def runs_parser(doc: str | None, known: Iterable[str], work: str) -> argparse.ArgumentParser:
    """The options of a benchmark that goes through named runs of a few steps."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a run, the first not timed")
    parser.add_argument("--only", default="", help=f"of {', '.join(known)}")
    parser.add_argument("--work", default=work, help="folder of the runs and of finished rows")
    parser.add_argument("--fresh", action="store_true", help="forget finished rows")
    parser.add_argument("--json", help="write the figures here as well")
    return parser


def parsed(parser: argparse.ArgumentParser, known: Iterable[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the names of the runs that were asked for."""
    args, known = parser.parse_args(), list(known)
    names = [n for n in args.only.split(",") if n] or known
    if unknown := set(names) - set(known):
        parser.error(f"--only {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    if args.steps < 2:
        parser.error("--steps 2 at least: the first is not timed")
    return args, names


def digest(value: Any) -> str:
    """A short name for plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def source_digest() -> str:
    """Of the source of the skimp that children import: a stored row of another skimp is not this
    skimp's row.
    """
    spec = importlib.util.find_spec("skimp")
    if spec is None or spec.origin is None:
        sys.exit("skimp is not installed here: make install")
    home, found = Path(spec.origin).parent, hashlib.sha256()
    for path in sorted(home.rglob("*")):
        if path.suffix in (".py", ".c", ".cpp", ".json"):
            found.update(str(path.relative_to(home)).encode() + path.read_bytes())
    return found.hexdigest()[:24]


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in ("skimp", "torch", "transformers", "accelerate"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine() -> str:
    """Processor, cores this process may use, memory, system, versions and the date, in two lines."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{cpu}, {cores} cores, {gb(memory)} of memory, {platform.system()} {platform.release()}\n"
        f"{known}; {datetime.date.today().isoformat()}"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table that also reads well as plain text; numbers to the right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(str(h)), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(head)]
    right = [bool(cells) and all(r[i][:1].isdigit() or r[i][:1] in "+-–" for r in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        return "| " + " | ".join(parts) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([line(list(head)), rule, *(line(r) for r in cells)])


def gb(nbytes: float) -> str:
    """'7.07 GB': 10⁹ bytes, as in budgets."""
    return f"{nbytes / 1e9:.2f} GB"


def mb(nbytes: float) -> str:
    """'75 MB': 10⁶ bytes."""
    return f"{nbytes / 1e6:.0f} MB"


def middle(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return median(values) if values else float("nan")


def write_json(path: str | None, value: Any) -> None:
    """The benchmark's `--json`."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(value, indent=1) + "\n", "utf-8")


def verdicts(claims: Iterable[tuple[str, float, str, float]]) -> tuple[list[str], bool]:
    """Lines 'met' or 'MISSED' for (what, found, '<=' or '>=', wanted), and whether all are met. NaN
    is missed.
    """
    lines, good = [], True
    for what, found, sign, wanted in claims:
        met = found <= wanted if sign == "<=" else found >= wanted
        good = good and met
        lines.append(f"{'met   ' if met else 'MISSED'}  {what}: {found:.4g} (wanted {sign} {wanted:g})")
    return lines, good
