"""The page and the Markdown of a plan: whole, alone, and saying what the plan says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report_cases import plan, timeline
from test_report_page import Nested

from skimp.report import plan_page as pages
from skimp.report.plan_markdown import plan_markdown
from skimp.report.plan_page import plan_page, story_of
from skimp.report.step_memory import step_memory


def planned(**changes: Any) -> dict[str, Any]:
    others = [{"fits": False, "peak_bytes": 3 * 10**9, "seconds": 2.0, "label": "no recompute | all", "exact": True,
               "overrides": ["exact.recompute=0"]},
              {"fits": True, "peak_bytes": 10**9, "seconds": 1.0, "label": "lora", "exact": False,
               "overrides": ["adapter=lora"]}]  # fmt: skip
    return {**plan(), "trained": 125_000_000, "alternatives": others, **changes}


def drawn() -> dict[str, Any]:
    found = timeline()
    count = len(found["operator"])
    return {
        **found,
        "names": ["aten::mm", "</script><b>"],
        "name": [0] * (count - 1) + [1],
        "simulated": {"micro_batches": 2, "of": 4},
        "places": [
            {"phase": "backward", "owner": "block 0", "bytes": 11 * 10**8, "operator": "aten::mm",
             "by_category": {"weights": 5 * 10**8, "activations": 4 * 10**8, "logits": 8}}
        ],
    }  # fmt: skip


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="timeline-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_the_page_of_a_plan_is_whole_and_fetches_nothing() -> None:
    text = plan_page(planned(), drawn())
    parser = Nested()
    parser.feed(text)
    assert parser.open == []
    assert [f for f in parser.fetched if f != "script"] == []
    for word in ("url(", "@import", "fetch(", "XMLHttpRequest", "import("):
        assert word not in text, word
    words = " ".join(" ".join(parser.words).split())
    for part in (
        "tiny <model>", "fits", "1.60 GB of 2.00 GB on cpu", "Of its 4 micro-batches two are drawn",
        "phase backward , owner block 0 , operator aten::mm : 1.10 GB of tensors", "weights 500 MB, activations 400 MB",
        "recompute 1 of 1 blocks", "exact.recompute=0", "(changes the mathematics)", "no gradient clipping",
    ):  # fmt: skip
        assert part in words, part
    assert "does not fit" in plan_page(planned(fits=False), drawn())


def test_every_moment_is_in_the_page_with_its_owner_and_operator() -> None:
    data, told = data_of(plan_page(planned(), drawn())), drawn()
    assert data["owners"] == [told["owners"][i] for i in told["owner"]]
    assert data["phases"] == [told["phases"][i] for i in told["phase"]]
    assert data["names"][0] == "aten::mm"
    assert data["names"][-1] == "</script><b>"  # and ended no element on the way
    assert [layer["name"] for layer in data["layers"]] == ["process", "weights", "gradients", "activations"]
    totals = [sum(layer["bytes"][i] for layer in data["layers"]) for i in range(len(data["seconds"]))]
    assert max(totals) == told["peak"]["total"] + 4 * 10**8
    assert data["segments"][0][0] == "ready"
    assert {level["kind"] for level in data["levels"]} == {"planned", "budget"}


def test_a_plan_is_drawn_without_a_second_line_of_itself() -> None:
    memory = step_memory(story_of(planned(), drawn()))
    assert memory is not None
    assert memory.planned is None
    assert memory.where == "backward, block 0 (aten::mm)"


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to read JavaScript with")
def test_the_script_is_javascript() -> None:
    script = Path(pages.__file__).with_name("timeline.js")
    done = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_markdown_is_a_table_with_as_many_cells_in_every_row() -> None:
    text = plan_markdown(planned(), {"skimp": "1", "torch": "2", "python": "3"})
    blocks = [b.splitlines() for b in text.split("\n\n") if b.startswith("|")]
    assert len(blocks) == 2
    for rows in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(counts) == 1, rows
    assert text.startswith("**tiny &lt;model>: fits**, 1.60 GB of 2.00 GB on cpu\n")
    assert "| weights | 500 MB | 31% |" in text
    assert "no recompute \\| all" in text
    assert "lora (changes the mathematics)" in text
    assert text.endswith("_skimp 1, torch 2_\n")
    assert "to type" not in plan_markdown(planned(alternatives=[]))
    many = planned(alternatives=planned()["alternatives"] * 6)
    assert "and 4 more" in plan_markdown(many)
