"""Options of `gemini_python` behind a script that does not know them are explained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gemini.cli.launcher_flags import OPTIONS
from gemini.launcher.process.misplaced_options import LAUNCHER_OPTIONS

COMMAND = str(Path(sys.executable).with_name("gemini_python"))
SCRIPT = """\
import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
print(parser.parse_args())
"""


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--seed", "3", "--mode", "pipeline"], "--mode is an option of gemini_python: it goes before the script"),
        (
            ["--stage-cnt=2", "--no-gemini", "--other"],
            "--stage-cnt and --no-gemini are options of gemini_python: they go before the script",
        ),
        (["--other", "mode"], ""),
        (["--seed", "x"], ""),
        (["--seed", "3"], ""),
    ],
)
def test_an_error_of_the_script_is_followed_by_a_hint(tmp_path: Path, words: list[str], hint: str) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    plain, done = (
        subprocess.run([command, "main.py", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        for command in (sys.executable, COMMAND)
    )
    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert done.stderr == plain.stderr + (f"gemini_python: {hint}\n" if hint else "")


def test_quiet_runs_print_no_hint(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SCRIPT)
    words = [COMMAND, "-q", "main.py", "--mode", "pipeline"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "gemini_python" not in done.stderr


def test_every_option_that_runs_a_program_is_known() -> None:
    assert {option.name for option in OPTIONS if option.group != "information"} == LAUNCHER_OPTIONS
