"""The timeline to look closer at: its data as JSON, the script that draws it, a picture where scripts are off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skimp.report.gather import Story
from skimp.report.memory_svg import memory_svg
from skimp.report.step_memory import StepMemory

HERE = Path(__file__).parent


def live(story: Story, memory: StepMemory, picture: bool = True) -> str:
    """The element and its data; with `picture` the static one for a page whose scripts are off."""
    # "</" would end the script element early, whatever its type.
    data = json.dumps(moments(story, memory), separators=(",", ":")).replace("</", "<\\/")
    return f'<div id="timeline"></div><script type="application/json" id="timeline-data">{data}</script>' + (
        f'<noscript><div class="wide">{memory_svg(memory)}</div></noscript>' if picture else ""
    )


def script() -> str:
    """The script element, for the end of the page."""
    return f"<script>{(HERE / 'timeline.js').read_text('utf-8')}</script>"


def style() -> str:
    """The rules of the page and of the timeline."""
    return (HERE / "style.css").read_text("utf-8") + (HERE / "timeline.css").read_text("utf-8")


def moments(story: Story, memory: StepMemory) -> dict[str, Any]:
    """What the script draws: every recorded moment, not only one a pixel; `resident` where the system was asked."""
    drawn = story.timeline or {}
    count = len(drawn["seconds"])
    layers = [("process", [story.baseline] * count)] if story.baseline else []
    layers += [(name, drawn["bytes"][name]) for name, _ in memory.layers if name != "process"]
    names, index = drawn.get("names", [""]), drawn.get("name", [0] * count)  # a run of an older skimp has none
    return {
        "title": memory.title(),
        "seconds": [round(s, 6) for s in drawn["seconds"]],
        "end": memory.end,
        "layers": [{"name": name, "bytes": sizes} for name, sizes in layers],
        "phases": [drawn["phases"][i] for i in drawn["phase"]],
        "owners": [drawn["owners"][i] for i in drawn["owner"]],
        "names": [names[i] for i in index],
        "operators": drawn["operator"],
        "resident": drawn["resident"] if memory.resident is not None else None,
        "segments": memory.phases,
        "levels": [{"words": v.words, "bytes": v.size, "kind": v.kind} for v in memory.levels],
    }
