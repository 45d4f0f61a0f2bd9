"""Uncaught exceptions of a program or its threads are printed as `python` prints them."""

from __future__ import annotations

import io
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

import pytest

from gemini.launcher import excepthook
from gemini.launcher.script_api import cuda_stubs


def raises() -> None:
    raise ValueError("mine")


def through_ours() -> ValueError:
    """An exception of the program's, with a frame of ours on its way."""
    code = compile("call()", cuda_stubs.__file__, "exec")
    try:
        exec(code, {"call": raises})
    except ValueError as error:
        return error
    raise AssertionError


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    excepthook.install()


@pytest.mark.usefixtures("hooks")
def test_frames_of_ours_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    error = through_ours()
    frames = traceback.extract_tb(error.__traceback__)
    assert [frame.name for frame in frames] == ["through_ours", "<module>", "raises"]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.excepthook(ValueError, error, error.__traceback__)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert shown == "".join(traceback.format_exception(ValueError, error, error.__traceback__))
    assert "stand_ins.py" not in shown
    assert "in through_ours" in shown
    assert "in raises" in shown


@pytest.mark.usefixtures("hooks")
def test_nor_where_a_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        raise through_ours()

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    thread = threading.Thread(target=run, name="theirs")
    thread.start()
    thread.join()
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert shown.startswith("Exception in thread theirs:\nTraceback")
    assert "in raises" in shown
    assert "stand_ins.py" not in shown


def test_hooks_of_the_program_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any: ...

    monkeypatch.setattr(sys, "excepthook", mine)
    monkeypatch.setattr(threading, "excepthook", mine)
    excepthook.install()
    assert sys.excepthook is mine
    assert threading.excepthook is mine
