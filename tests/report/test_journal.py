"""`gemini explain` reports what happened in the last run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from gemini.cli.main import main
from gemini.report.journal_reader import read_newest
from gemini.runtime import run_journal as journals
from gemini.runtime.run_journal import RunJournal
from tests.launcher.process.launching import GEMINI, run, script

SMALL = """\
import torch
from torch import nn

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tells_paths_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = RunJournal(tmp_path)
    story = journal.add_model("Net", 2)
    for _ in range(3):
        story.record("overlapped")
    story.record("dispatched", "softmax over the batch in head")
    story.record("local", "F.relu is replaced")
    story.record("dispatched", "softmax over the batch in head")
    for module in ("a", "b", "a", "c", "d"):
        story.record_module(module, "it holds tensors that cannot live in shared memory\n    → clone them")
    story.plan = "2 stages, 12 ms a step expected"
    for step_ms in (90.0, 12.6, 13.4, 13.1):
        story.record_time(step_ms)
    journal.write()
    assert main(["explain", "--run-folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines() == [
        "Net on 2 workers: 3 overlapped, 2 eager dispatch, 1 local",
        "  plan: 2 stages, 12 ms a step expected; 13 ms measured (median of the last 4)",
        "  2 × eager dispatch: softmax over the batch in head",
        "  1 × local: F.relu is replaced",
        "  4 × local module: it holds tensors that cannot live in shared memory (a, b, c, …)",
    ]
    assert main(["explain", "--run-folder", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["steps"] == {"overlapped": 3, "dispatched": 2, "local": 1}


def test_without_a_run_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--run-folder", str(tmp_path / "none")]) == 2
    assert "run a script with workers first" in capsys.readouterr().err
    (tmp_path / "explain-1.json").write_text("{")
    assert main(["explain", "--run-folder", str(tmp_path)]) == 2
    assert "run the script again" in capsys.readouterr().err


def test_a_program_that_is_killed_has_told_its_first_steps(tmp_path: Path) -> None:
    story = RunJournal(tmp_path).add_model("Net", 2)
    story.record("dispatched", "the first call")
    assert [found.steps for found in read_newest(tmp_path)] == [{"dispatched": 1}]


def test_leaving_at_once_writes_it_first(tmp_path: Path) -> None:
    left: list[int] = []
    leave = journals._before_exit(left.append)
    story = journals.get_journal(tmp_path).add_model("Net", 2)
    for _ in range(5):
        story.record("overlapped")
    leave(3)
    assert left == [3]
    assert [found.steps for found in read_newest(tmp_path)] == [{"overlapped": 5}]


def test_a_model_without_workers_is_explained_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = RunJournal(tmp_path)
    journal.record_local("Net", "a step of 3 ms is too short to gain from workers")
    journal.write()
    assert main(["explain", "--run-folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Net in the process of the script",
        "  1 × local: a step of 3 ms is too short to gain from workers",
    ]


def test_where_it_cannot_be_written_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    story = RunJournal(tmp_path / "file" / "folder").add_model("Net", 2)
    for _ in range(5):
        story.record("overlapped")
    assert capsys.readouterr().err.count("gemini explain will not show this run") == 1


def test_a_run_without_workers_makes_no_run_folder(tmp_path: Path) -> None:
    """It is explained all the same, also after a run with workers, and with them it is in the run folder."""
    folder = tmp_path / "run" / ".gemini"
    local = RunJournal(folder)
    local.record_local("Net", "too short")
    local.write()
    assert not folder.parent.exists()
    assert [found.reasons for found in read_newest(folder)] == [{"local: too short": 1}]
    with_workers = RunJournal(folder)
    with_workers.record_local("Small", "too short")
    with_workers.add_model("Net", 2).record("overlapped")
    assert [path.name for path in folder.iterdir()] == [f"explain-{os.getpid()}.json"]
    assert [found.model for found in read_newest(folder)] == ["Small", "Net"]
    local.write()
    assert [found.reasons for found in read_newest(folder)] == [{"local: too short": 1}]
    assert len([*folder.iterdir()]) == 1


def test_a_short_script_leaves_its_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "main.py").write_text(SMALL)
    subprocess.run([*GEMINI, "main.py"], cwd=tmp_path / "run", capture_output=True, check=True, timeout=60)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["main.py"]
    (found,) = read_newest(tmp_path / "run" / ".gemini")
    assert "too short for workers" in "".join(found.reasons)
    monkeypatch.chdir(tmp_path / "run")
    assert read_newest(Path(".gemini")) == [found]


def test_the_last_run_is_reported_also_without_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = script("idle", "import torch\ntorch.ones(2).sum()\n")
    run(GEMINI, idle, tmp_path / "run")
    folder = tmp_path / "run" / ".gemini"
    assert not folder.exists()
    earlier = RunJournal(folder)
    earlier.add_model("Net", 2).record("overlapped")
    os.utime(earlier.write(), (0, 0))
    run(GEMINI, idle, tmp_path / "run", fresh=False)
    assert main(["explain", "--run-folder", str(folder)]) == 0
    assert capsys.readouterr().out == "the last run trained no model with workers: it ran as under python\n"
    assert main(["explain", "--run-folder", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
