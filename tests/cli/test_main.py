"""The `gemini` command itself: finding sub-commands, help, version, and clear failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gemini import __version__
from gemini.cli import main as cli
from gemini.cli.main import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gemini {__version__}\n"


def test_help_lists_the_commands_with_their_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "schedule" in out
    assert "compose a pipeline schedule" in out


def test_help_about_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "schedule"]) == 0
    first = capsys.readouterr().out
    assert main(["schedule", "--help"]) == 0
    assert capsys.readouterr().out == first
    assert "--placement" in first


def test_without_a_command_the_help_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: gemini")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("shedule", "unknown command 'shedule'; did you mean 'schedule'?"),
        ("xyz", "unknown command 'xyz'\n    → commands are"),
        ("--placement", "unknown option '--placement'"),
    ],
)
def test_an_unknown_command_names_the_nearest(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_a_listed_command_that_is_missing_breaks_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "absent", "gemini.cli.absent_command")
    assert main(["absent"]) == 2
    assert "gemini absent: not in this installation" in capsys.readouterr().err
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "absent" not in out
    assert "schedule" in out


def test_a_broken_command_breaks_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_command.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "broken", "broken_command")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "cannot be loaded: No module named 'a_package_nobody_has'" in out
    assert "compose a pipeline schedule" in out


def test_only_the_chosen_command_is_imported() -> None:
    code = (
        "import sys; from gemini.cli.main import main, COMMANDS; main(['--version']); "
        "loaded = [m for m in COMMANDS.values() if m in sys.modules]; "
        "assert not loaded and 'torch' not in sys.modules and 'rich' not in sys.modules, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
