"""Output, exit status and files of a program are the same under `gemini_python` as under `python`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch_cases import ALL, main_module
from launching import Case, both

FIRST = {
    *(case.name for case in main_module.CASES),
    *(
        "package",
        "namespace",
        "reload",
        "import-raises",
        "import-syntax-error",
        "frames-during-import",
        "run-path-raises",
    ),
    *("cache-is-pythons-own", "shadow-ast", "script-named-types", "own-loader", "warnings-shown-once"),
    *(
        "module-raises",
        "module-package",
        "module-missing",
        "directory",
        "zip",
        "command",
        "stdin-dash",
        "missing-script",
    ),
    *("end", "exit-text", "raise", "raise-chained", "signal-int", "signal-term", "keyboard-interrupt", "excepthook"),
    *("latin-1", "syntax-error", "syntax-error-late", "syntax-warning-is", "syntax-warning-as-error", "future-several"),
    *("optimize-twice", "isolated", "x-options", "skip-first-line", "stdin", "locale-c", "multiprocessing-spawn"),
}
"""The cases that run on every change; the others take longer together than a quick run allows."""

UNTRAINED = "gemini: no model was trained: the program ran as under python\n"
"""The notice about a program that imports torch and trains nothing."""


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    marks = [] if case.name in FIRST else [pytest.mark.slow]
    if sys.version_info < case.since:
        marks.append(pytest.mark.skip(reason=f"needs Python {case.since}"))
    return marks


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=_marks(case)) for case in ALL])
def test_same_as_python(case: Case, tmp_path: Path) -> None:
    if case.torch:
        pytest.importorskip("torch")
    expected, got = both(case, tmp_path / "project", timeout=120)
    said = got.stderr.replace(UNTRAINED, "") if case.torch else got.stderr
    assert said == expected.stderr
    assert got.stdout == expected.stdout
    assert got.code == expected.code
    assert got.files == expected.files


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in ALL]
    assert sorted(names) == sorted(set(names))
