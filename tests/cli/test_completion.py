"""`gemini completion`: the shells complete every command and option."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from gemini.cli.completion import SHELLS, command_options
from gemini.cli.main import COMMANDS, main


def complete(script: str, function: str, *words: str) -> set[str]:
    """What bash offers for the last word."""
    given = " ".join(f"'{word}'" for word in words)
    lines = (
        f"{script}\nCOMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; {function}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def script() -> str:
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(text := StringIO()):
        assert main(["completion", "bash"]) == 0
    return text.getvalue()


def test_every_command_and_option_is_completed(script: str) -> None:
    assert complete(script, "_gemini", "gemini", "") >= set(COMMANDS)
    assert complete(script, "_gemini", "gemini", "sched") == {"schedule"}
    assert complete(script, "_gemini", "gemini", "report", "--per") == {"--perfetto"}
    assert complete(script, "_gemini_python", "gemini_python", "--pipe") == {"--pipeline-degree"}


def test_arguments_of_the_script_are_not_completed(script: str) -> None:
    assert complete(script, "_gemini_python", "gemini_python", "train.py", "--pipe") == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_every_shell_is_accepted(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in command_options())
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
