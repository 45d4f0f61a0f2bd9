"""CPython's test suite gives the same results under `gemini_python` as under `python`."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import GEMINI, PYTHON

pytestmark = pytest.mark.skipif(find_spec("test.libregrtest") is None, reason="this Python comes without its tests")

QUICK = ["test_grammar", "test_runpy", "test_atexit", "test_code"]
SLOW = [
    *(
        "test_inspect",
        "test_pickle",
        "test_traceback",
        "test_import",
        "test_importlib",
        "test_pkgutil",
        "test_linecache",
    ),
    *("test_syntax", "test_cmd_line_script", "test_doctest", "test_pdb", "test_sys_settrace", "test_warnings"),
    *("test_zipimport", "test_faulthandler", "test_signal", "test_dataclasses", "test_sys", "test_exceptions"),
    *("test_compile", "test_frame", "test_threading", "test_sys_setprofile"),
]
SPAWN = (
    "import unittest\nfrom test._test_multiprocessing import install_tests_in_module_dict\n"
    "install_tests_in_module_dict(globals(), 'METHOD')\n"
    "if __name__ == '__main__':\n    unittest.main()\n"
)


def results(command: list[str], words: list[str], folder: Path) -> tuple[int, list[str]]:
    """Exit status, and the result of every single test."""
    done = subprocess.run(
        [*command, *words, "-v"], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    lines = re.findall(r"^(test\w* \(.*\)).* \.\.\. (ok|FAIL|ERROR|skipped)", done.stdout + done.stderr, re.MULTILINE)
    return done.returncode, sorted(map(" ".join, lines))


def _exists(name: str) -> bool:
    return find_spec(f"test.{name.partition('.')[0]}") is not None


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_same_results(name: str, tmp_path: Path) -> None:
    if not _exists(name):
        pytest.skip(f"Python {sys.version_info[:2]} has no {name}")
    expected = results(PYTHON, ["-m", "test", name], tmp_path)
    if not expected[1]:
        pytest.skip(f"{name} does not run in this installation")
    assert results(GEMINI, ["-m", "test", name], tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_same_results_with_the_tests_instrumented(name: str, tmp_path: Path) -> None:
    if not _exists(name):
        pytest.skip(f"Python {sys.version_info[:2]} has no {name}")
    expected = results(PYTHON, ["-m", "test", name], tmp_path)
    if not expected[1]:
        pytest.skip(f"{name} does not run in this installation")
    assert results([*GEMINI, "--instrument", "test"], ["-m", "test", name], tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_same_results_in_processes_started_anew(method: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SPAWN.replace("METHOD", method))
    words = ["own.py", "WithProcessesTestProcess"]
    expected = results(PYTHON, words, tmp_path)
    assert results(GEMINI, words, tmp_path) == expected
    assert expected[1]
