"""What a bit-equal resume needs is noted, and each difference is named."""

from __future__ import annotations

import json

from skimp.run.environment import differences, environment


def test_it_is_plain_and_equal_to_itself() -> None:
    now = environment()
    assert differences(json.loads(json.dumps(now)), environment()) == []
    assert now["threads"] >= 1
    assert now["skimp"] != "not installed"


def test_decisive_differences_are_named_with_both_values() -> None:
    now = environment()
    saved = {**now, "threads": 64, "python": "2.7"}
    del saved["cpu_capability"]
    told = differences(saved, now)
    assert len(told) == 2
    assert told[0].startswith(f"cpu_capability was not noted and is {now['cpu_capability']}")
    assert told[1].startswith(f"threads was 64 and is {now['threads']}")
