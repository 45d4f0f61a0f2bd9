"""Log lines bypass the program's `print`."""

from __future__ import annotations

import ast
import builtins
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

import gemini
from gemini.config.gemini_config import GeminiConfig
from gemini.launcher import run_summary
from gemini.log import log_line

ROOT = Path(gemini.__file__).parent
BESIDE = ("capture", "launch", "managed", "pipe", "planner", "randomness", "runtime", "splitting", "step")


def test_a_line_reaches_standard_error_whatever_print_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builtins, "print", lambda *_, **__: pytest.fail("the program's print was called"))
    log_line("gemini: all is well")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "gemini: all is well\n")


def last_states(text: str) -> list[str]:
    """What a terminal shows in each line: the text since the last carriage return, longer remainders included."""
    shown = []
    for line in text.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        shown.append(cells.rstrip())
    return shown


def test_a_line_is_not_written_inside_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in tqdm(range(2), desc="steps", mininterval=0):
        log_line("gemini: all is well")
    lines = last_states(capsys.readouterr().err)
    assert lines.count("gemini: all is well") == 2
    assert [line.startswith("steps: ") for line in lines if "gemini" not in line and line] == [True]


def test_bars_on_piped_output_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    bar = tqdm(total=2, file=sys.stdout, mininterval=0)
    drawn = capsys.readouterr().out
    log_line("gemini: all is well")
    assert capsys.readouterr() == ("", "gemini: all is well\n")
    bar.close()
    assert drawn


def test_a_line_is_above_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console(file=terminal, force_terminal=True, width=60)
    with Progress(console=console, auto_refresh=False) as progress:
        progress.add_task("steps", total=2)
        progress.refresh()
        log_line("gemini: all is well")
        progress.refresh()
    assert "\ngemini: all is well" in terminal.getvalue() or "\x1b[2Kgemini: all is well" in terminal.getvalue()


def test_the_summary_of_a_run_is_not_written_inside_a_progress_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_summary, "rows", lambda *_, **__: [("model", "Net")])
    bar = tqdm(total=2, desc="steps", mininterval=0)
    run_summary.show(None, None, "SGD", GeminiConfig())  # type: ignore[arg-type]
    bar.close()
    lines = last_states(capsys.readouterr().err)
    assert not any("steps" in line for line in lines if "─" in line or "Net" in line)


@pytest.mark.parametrize("part", BESIDE)
def test_nothing_that_runs_beside_a_program_prints(part: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []
