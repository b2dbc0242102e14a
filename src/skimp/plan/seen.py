"""What earlier runs on this machine say about a plan: how far off plans were, and what is added for it.

Only runs of the same torch and skimp on the same hardware count, and of bytes only those planned with 300 MB of tensors
at least: a smaller one's error is the process's own. Plans learn in one direction: a run that took more than its plan
adds to the allowance of the next ones; nothing is ever taken off the rule. A run that took half as much again as the
rule allows is no error of a plan: something else was in its process (a notebook, another library, a test), and what is
learned from it would be asked of every run to come. It is counted and said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from skimp.core.memory.process import Policy
from skimp.core.units import format_bytes

#: Bytes of planned tensors, and above the process's own, from which a run's error counts.
LEAST = 300_000_000
#: Share of what the rule allows beyond which a run's excess is not the plan's.
APART = 0.5
#: Predicted seconds of a step from which its ratio says something of another recipe's: below, calls and not arithmetic
#: take the time.
LEAST_SECONDS = 0.1
#: Newest records that are looked at.
NEWEST = 200


@dataclass(frozen=True)
class More:
    """What is added to a policy's allowance: the larger of so many bytes and of a share of the tensors."""

    bytes: int = 0
    share: float = 0.0

    def of(self, tracked: int) -> int:
        """Bytes added for a tracked peak."""
        return max(self.bytes, int(self.share * tracked))


@dataclass(frozen=True)
class Seen:
    """Errors of plans on this machine so far.

    Attributes:
        errors: signed, over (peak - baseline), by today's rule; above 0 the rule is above what was measured.
        more: by policy, what runs took above the rule.
        ratios: measured by predicted seconds of a step, where a step takes a tenth of a second at least.
        here: the same of runs of this very recipe.
        apart: runs that took so much more than planned that nothing is learned from them.
    """

    errors: tuple[float, ...] = ()
    more: Mapping[Policy, More] = field(default_factory=dict)
    ratios: tuple[float, ...] = ()
    here: tuple[float, ...] = ()
    apart: int = 0

    def least_bytes(self, peak: int, baseline: int) -> int:
        """The least that earlier errors let expect of a process planned at `peak`, which is the most."""
        largest = max([0.0, *self.errors])
        return baseline + int((peak - baseline) / (1 + largest))

    def seconds(self, seconds: float) -> tuple[float, float] | None:
        """By the middle four fifths of earlier ratios, of this very recipe's where there are any; None without."""
        known = sorted(self.here or self.ratios)
        if not known:
            return None
        cut = len(known) // 10
        return seconds * known[cut], seconds * known[-1 - cut]

    def sentences(self) -> list[str]:
        """For a person; empty without a run that counts."""
        said = []
        if self.errors:
            under = sum(e < 0 for e in self.errors)
            low = f"{under} took more than planned" if under else "none took more than planned"
            mean = sum(self.errors) / len(self.errors)
            runs = _runs(len(self.errors))
            said.append(
                f"{runs} on this machine so far: plans {mean:+.1%} of what was taken on the mean, "
                f"{min(self.errors):+.1%} to {max(self.errors):+.1%}; {low}"
            )
        if self.apart:
            said.append(
                f"{_runs(self.apart)} took more than {1 + APART:.1f} times what plans allow: something else was in the "
                "process, and nothing is added for it"
            )
        added = [f"{format_bytes(m.bytes)} or {m.share:.1%} ({policy})" for policy, m in self.more.items() if m.bytes]
        if added:
            said.append(f"added to the allowance for what those took: {', '.join(added)}")
        known, what = (self.here, " of this shape") if self.here else (self.ratios, "")
        if known:
            said.append(
                f"seconds of a step: measured {min(known):.2f} to {max(known):.2f} of predicted, "
                f"the middle one {median(known):.2f}, over {_runs(len(known))}{what}"
            )
        return said

    def as_dict(self) -> dict[str, Any]:
        return {
            "runs": len(self.errors),
            "mean_error": sum(self.errors) / len(self.errors) if self.errors else None,
            "least_error": min(self.errors, default=None),
            "largest_error": max(self.errors, default=None),
            "added": {policy: {"bytes": m.bytes, "share": m.share} for policy, m in self.more.items()},
            "seconds_ratio": median(self.ratios) if self.ratios else None,
        }


def _runs(count: int) -> str:
    return f"{count} run{'s' if count != 1 else ''}"


def seen(
    records: Iterable[Mapping[str, Any]],
    machine: str,
    versions: Mapping[str, Any],
    rule: Callable[[Mapping[str, Any]], int],
    recipe: str = "",
) -> Seen:
    """What the log's records say.

    Args:
        records: of `history.read`, oldest first.
        machine: this one's name.
        versions: `torch` and `skimp` of this process.
        rule: f(record) -> bytes the rule allows beside the baseline, without anything learned: a run is held against
            today's rule, not against the one it was planned by.
        recipe: digest of the one that is planned now.
    """
    same = ("skimp", "torch")
    mine = [
        r for r in records if r.get("machine") == machine and all(r["versions"].get(k) == versions.get(k) for k in same)
    ][-NEWEST:]
    errors, more, ratios, here, apart = [], dict[Policy, More](), [], [], 0
    for r in mine:
        planned, measured = r["planned"], r["measured"]
        if measured.get("seconds") and planned["seconds"]:
            ratio = measured["seconds"] / planned["seconds"]
            if planned["seconds"] >= LEAST_SECONDS:
                ratios.append(ratio)
            if recipe and r.get("recipe") == recipe:
                here.append(ratio)
        if not measured.get("process") or measured.get("survived"):
            continue
        above, policy = measured["process"] - planned["baseline"], r["shape"].get("malloc")
        if above < LEAST or planned["highest"] < LEAST:
            continue
        if above > (1 + APART) * rule(r):
            apart += 1
            continue
        errors.append((planned["baseline"] + rule(r) - measured["process"]) / above)
        over = int(above - rule(r))
        if over > 0:
            old = more.get(policy, More())
            more[policy] = More(max(old.bytes, over), max(old.share, over / max(1, planned["highest"])))
    return Seen(tuple(errors), more, tuple(ratios), tuple(here), apart)
