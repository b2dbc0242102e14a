"""`python -m skimp.run.doctor.sound CHECKPOINT`: read every tensor against its checksum. One line of JSON.

`wrong` is empty when every byte is as it was written, else what is not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from skimp.core.errors import CheckpointError
from skimp.run import checkpoint_read


def wrong(path: Path) -> str:
    """What is wrong with a checkpoint's bytes; empty when nothing is."""
    try:
        with checkpoint_read.load(path) as saved:
            saved.verify()
    except CheckpointError as error:
        return f"{error.asked}: {error.found}"
    return ""


if __name__ == "__main__":
    print(json.dumps({"wrong": wrong(Path(sys.argv[1]))}))
