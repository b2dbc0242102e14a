"""SIGTERM and Ctrl-C become a flag that the loop reads between two optimizer steps.

A signal in the middle of a step must not leave half of the parameters moved, so nothing is interrupted: the
loop finishes its step, saves, and says how to continue. Whoever cannot wait presses Ctrl-C again.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Context manager around the loop.

    Attributes:
        signal_name: "SIGTERM" or "SIGINT" once one arrived, else None.
        last_checkpoint: set by the loop after each save; the message of a second Ctrl-C names it.

    The second Ctrl-C (or the first after a SIGTERM) raises KeyboardInterrupt at once. SIGTERM again changes
    nothing: launchers repeat it. Outside the main thread Python cannot take signals; there a warning says so
        and only
    `request` sets the flag.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.last_checkpoint: Path | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True when the loop should save and stop at the next step boundary."""
        return self.signal_name is not None

    def request(self, name: str) -> None:
        """Ask for a stop from inside the process, as if a signal called `name` had come."""
        self.signal_name = self.signal_name or name

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            warnings.warn(
                "not the main thread: SIGTERM and Ctrl-C will not save before stopping",
                RuntimeWarning,
                stacklevel=2,
            )
            return self
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: it was installed from C and cannot be put back from Python; the default is nearest to it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested and number == signal.SIGINT:
            kept = (
                f"the last complete checkpoint is intact: {self.last_checkpoint}"
                if self.last_checkpoint
                else ("there is no checkpoint yet")
            )
            _say(f"\nstopped at once; {kept}\n")
            raise KeyboardInterrupt
        if not self.requested:
            self.signal_name = name
            _say(f"\n{name}: finishing this step, then saving. Ctrl-C again stops at once.\n")


def _say(text: str) -> None:
    # Straight to the descriptor: a handler may have interrupted a print, and buffered streams refuse
    # re-entry.
    os.write(2, text.encode())
