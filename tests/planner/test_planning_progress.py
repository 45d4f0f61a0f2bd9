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
    monkeypatch.setattr(progress_line, "_FIRST_S", 0.3)
    monkeypatch.setattr(progress_line, "log_line", lambda text: (line(text), logged.set()))
    with planning_progress.planning_progress("GPT", quiet=False):
        planning_progress.begin_phase("profile")
        planning_progress.predict_seconds(7.0)
        assert logged.wait(20)
    assert "gemini: planning GPT: profile (3 of 5), 0 s so far, about 7 s left\n" in capsys.readouterr().err


def test_what_is_left_follows_from_phase_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_progress, "_predicted_s", [0.0])
    left = []
    for phase in planning_progress.PHASES[1:]:
        monkeypatch.setattr(planning_progress, "_phase", [phase])
        left.append(planning_progress._estimate_left(2.0))
    assert left == sorted(left, reverse=True)  # less in each later phase
    assert 4 < left[0] < 12
    assert left[-1] == 1


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
