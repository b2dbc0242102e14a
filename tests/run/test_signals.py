"""The first signal is a flag, the second Ctrl-C stops; handlers are put back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from skimp.run.signals import StopRequest


def test_the_first_signal_only_sets_the_flag(capfd: pytest.CaptureFixture) -> None:
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
        before = signal.getsignal(number)
        with StopRequest() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested
            assert stop.signal_name == name
        assert signal.getsignal(number) is before
        assert f"{name}: finishing this step, then saving." in capfd.readouterr().err


def test_sigterm_may_come_again_but_ctrl_c_then_stops_at_once(capfd: pytest.CaptureFixture) -> None:
    with StopRequest() as stop:
        stop.last_checkpoint = Path("runs/one/step-00000020")
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert "the last complete checkpoint is intact: runs/one/step-00000020" in capfd.readouterr().err


def test_the_second_ctrl_c_before_any_checkpoint(capfd: pytest.CaptureFixture) -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert "there is no checkpoint yet" in capfd.readouterr().err


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), StopRequest():
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stop_can_be_asked_for_from_inside() -> None:
    stop = StopRequest()
    stop.request("watchdog")
    stop.request("later")
    assert stop.signal_name == "watchdog"


def test_another_thread_is_told_that_signals_do_not_reach_it() -> None:
    seen: list[str] = []

    def work() -> None:
        with pytest.warns(RuntimeWarning, match="not the main thread"), StopRequest() as stop:
            seen.append(str(stop.requested))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["False"]
    assert signal.getsignal(signal.SIGINT) is before
