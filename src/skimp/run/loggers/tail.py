"""New whole lines of a JSON-lines file that another process appends to, and cuts back when it starts over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: So many bytes before the place reached are compared at each read: a file that was cut back and has grown past that
#: place again differs there.
MEMORY = 256


class Tail:
    """Reads a file on and on.

    Args:
        path: may be missing as yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = 0
        self._before = b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Rows appended since the last call.

        Returns:
            The rows; and whether the file was cut back meanwhile, in which case they are all rows from the start.
        """
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed by the `with` below
        except FileNotFoundError:
            return [], self._again() if self._place else False
        with file:
            kept = os.pread(file.fileno(), len(self._before), self._place - len(self._before))
            over = self._again() if kept != self._before else False
            file.seek(self._place)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._place += len(whole)
        self._before = (self._before + whole)[-MEMORY:]
        return [dict(json.loads(line)) for line in whole.splitlines()], over

    def _again(self) -> bool:
        self._place, self._before = 0, b""
        return True
