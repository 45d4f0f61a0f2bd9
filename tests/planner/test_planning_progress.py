"""Long waits are logged with phase and time; short ones are not."""

from __future__ import annotations

import threading

import pytest

from gemini import progress_line
from gemini.planner import planning_progress
from gemini.progress_line import ProgressLine


def test_the_phase_is_logged_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = threading.Event()
    line = progress_line.log_line
    monkeypatch.setattr(progress_line, "_FIRST_S", 0.01)
    monkeypatch.setattr(progress_line, "log_line", lambda text: (line(text), logged.set()))
    with planning_progress.planning_progress("GPT", quiet=False):
        planning_progress.begin_phase("profile")
        assert logged.wait(20)
    assert "gemini: planning GPT: profile (3 of 5), 0 s so far\n" in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_only_long_waits_are_logged(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logged = threading.Event()

    def describe(seconds: float) -> str:
        logged.set()
        return f"after {seconds:.0f} s"

    with ProgressLine(describe, quiet=quiet):
        pass
    with ProgressLine(describe, quiet=quiet):
        assert logged.wait(0.05 if quiet else 20) is not quiet
    for thread in threading.enumerate():
        if thread.name == "gemini-progress-line":
            thread.join()
    assert capsys.readouterr().err == ("" if quiet else "after 1 s\n")
