"""One line of what the doctor saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    Attributes:
        group: "machine", "software", "kernels", "accelerator", "extras", "files" or "check".
        name: what it is about; with its group it is the stable address of `--json`.
        value: what was found, for a person.
        state: ok; note: works, and could be better; wrong: something that a run needs is broken.
        mend: the command or sentence that mends it, where there is something to mend.
        facts: the same as plain values.
    """

    group: str
    name: str
    value: str
    state: State = "ok"
    mend: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "name": self.name,
            "value": self.value,
            "state": self.state,
            "mend": self.mend,
            **({"facts": self.facts} if self.facts else {}),
        }
