"""Log lines bypass the program's `print`."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import pytest

import gemini
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


@pytest.mark.parametrize("part", BESIDE)
def test_nothing_that_runs_beside_a_program_prints(part: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []
