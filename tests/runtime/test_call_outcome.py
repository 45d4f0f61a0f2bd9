"""Call paths and reasons are their texts: in journal files, in messages, as keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemini.report.journal_reader import read_newest
from gemini.runtime.call_outcome import CallPath, Eager, FallbackReason, describe_failure, describe_planning_error
from gemini.runtime.run_journal import RunJournal


def test_paths_are_the_keys_of_the_journals_files(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    model = journal.add_model("Net", 2)
    for path in CallPath:
        model.record(path, FallbackReason.READ_EARLY if path is CallPath.EAGER else "")
    written = json.loads(journal.write().read_text())["models"][0]
    assert written["steps"] == {"overlapped": 1, "undivided": 1, "dispatched": 1, "local": 1}
    assert written["reasons"] == {f"eager dispatch: {FallbackReason.READ_EARLY}": 1}
    (found,) = read_newest(tmp_path)
    assert (
        str(found).splitlines()[0] == "Net on 2 workers: 1 overlapped, 1 single micro-batch, 1 eager dispatch, 1 local"
    )


@pytest.mark.parametrize("reason", FallbackReason)
def test_reasons_are_one_line(reason: FallbackReason) -> None:
    assert f"{reason}" == str(reason) == reason.value
    assert "\n" not in reason
    assert Eager(reason).reason == reason


def test_errors_become_one_line() -> None:
    assert describe_failure(ValueError("one\ntwo")) == "ValueError: one"
    assert describe_planning_error(ValueError("one\ntwo\n    → a remedy")) == "one two"
    assert describe_planning_error(ValueError()) == "ValueError"
