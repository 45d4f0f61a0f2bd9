"""Long waits are logged with phase and time; short ones are not."""

from __future__ import annotations

import threading

import pytest

from gemini.planner.planning_progress import PlanningProgress
from gemini.progress_line import ProgressLine


def test_the_phase_and_the_time_left() -> None:
    progress = PlanningProgress("GPT")
    assert progress.describe(1.0) == "gemini: planning GPT: capture (1 of 4), 1 s so far"
    progress.expected_s = 9.0
    assert progress.describe(2.0) == "gemini: planning GPT: capture (1 of 4), 2 s so far, about 7 s left"
    progress.begin("profile")
    assert progress.describe(3.0).startswith("gemini: planning GPT: profile (2 of 4), 3 s so far")


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
