"""`survive:` — what a run does when memory runs short; none of it changes the mathematics."""

from __future__ import annotations

from pydantic import Field

from skimp.recipe.fields import Flag, Number, Section, Whole


class Survive(Section):
    """What happens when memory runs short in spite of the plan."""

    watchdog: Flag = Field(
        default=True,
        description="Watch resident memory: above the budget, go on smaller; with the machine nearly out, save and "
        "stop before the kernel kills.",
    )
    margin: Number = Field(
        default=0.02, ge=0, le=1, description="Share of the budget that may be exceeded before the watchdog acts."
    )
    retries: Whole = Field(
        default=3, ge=0, description="How often a step that ran out of memory is tried again, smaller where that helps."
    )
