"""`skimp plan --probe`: measure two real steps of a plan in a child process, and remember them like a run's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from skimp.core.child import child_environment, last_words
from skimp.core.errors import DoesNotFit, RecipeError, SkimpError
from skimp.core.units import format_bytes
from skimp.plan import history
from skimp.plan.plan import Plan


@dataclass(frozen=True)
class Trial:
    """Bytes and seconds of a planned step, measured.

    Attributes:
        baseline: of the child process before any tensor.
        tensors: tracked peak of the first step.
        process: resident peak over both; `expected`: the plan's, on the child's baseline.
        seconds: of the second step.
        said: why it could not be remembered; None when it was.
    """

    baseline: int
    tensors: int
    process: int
    expected: int
    seconds: float
    said: str | None = None

    @property
    def above(self) -> int:
        """Bytes that the process took more than planned; 0 when it took less."""
        return max(0, self.process - self.expected)

    def as_dict(self) -> dict[str, Any]:
        return {
            "baseline_bytes": self.baseline,
            "tensors_bytes": self.tensors,
            "process_bytes": self.process,
            "expected_bytes": self.expected,
            "seconds": self.seconds,
        }


def trial(recipe: Any, config: dict[str, Any], plan: Plan, patience: float = 3600.0) -> Trial:
    """Two steps of the plan at its real shape, with random weights of the same shapes.

    Args:
        recipe, config: as for `make_plan`.
        plan: of them.
        patience: seconds after which the child is stopped.

    Raises:
        RecipeError: the plan is for a card: its steps cannot be taken here.
        DoesNotFit: the plan does not fit, or not into what this machine has now.
        SkimpError: the child ended without an answer; says how.
    """
    where = plan.places
    if not where.on_cpu:
        raise RecipeError(
            "--probe", f"a plan for {where.device}", "this version takes steps on the CPU only", "leave --probe out"
        )
    room = where.device_budget if where.available is None else min(where.device_budget, where.available)
    if not plan.fits or plan.peak_bytes > room:
        raise DoesNotFit(
            "--probe: two real steps",
            f"{format_bytes(room)} for the process; the plan takes {format_bytes(plan.peak_bytes)}",
            "the system might kill a step that does not fit",
            ["a larger budget", "leave --probe out: the plan alone takes no memory"],
        )
    plain = recipe.as_dict()
    plain["exact"]["offload"]["folder"] = where.near or None  # the same disk; the run's own folder is not begun here
    words = {
        "recipe": plain,
        "config": config,
        "exact": plan.exact.as_dict(),
        "pool": where.pool_limit(plan.profile.working_bytes),
    }
    found = _child(words, patience)
    measured = {k: found[k] for k in ("tensors", "process", "seconds")}
    line = history.record(recipe, plan, {**measured, "steps": 2, "survived": 0}, found["versions"], "probe")
    line["planned"]["baseline"] = found["baseline"]
    expected = plan.peak_bytes - where.baseline + found["baseline"]
    line["planned"]["process"] = expected
    said = history.append(line)
    return Trial(found["baseline"], found["tensors"], found["process"], expected, found["seconds"], said)


def _child(words: dict[str, Any], patience: float) -> dict[str, Any]:
    asked = "--probe: two real steps in a process of their own"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "skimp.run.trial"],
            input=json.dumps(words).encode(),
            capture_output=True,
            check=False,
            timeout=patience,
            env=child_environment(TRANSFORMERS_VERBOSITY="error"),
        )
    except subprocess.TimeoutExpired as error:
        raise SkimpError(asked, f"no answer within {patience:g} s", instead="leave --probe out") from error
    if done.returncode == 0:
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    signalled = done.returncode < 0
    how = f"ended by signal {-done.returncode}" if signalled else last_words(done.stderr.decode(errors="replace"))
    raise SkimpError(
        asked,
        how,
        "the system ends a process that takes more memory than there is" if done.returncode == -9 else "",
        ["a smaller budget, so that the plan leaves more room", "leave --probe out"],
    )
