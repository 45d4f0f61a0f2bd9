"""`gemini_python` where it runs no program: help, faults, dumps."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("gemini_python"))


def gemini(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *words],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import torch  # the user's\nx = torch.zeros(1).cuda()\nprint('ran')\n")
    return tmp_path


def test_help_and_version(tmp_path: Path) -> None:
    for word in ("--help", "-h"):
        done = gemini(word, cwd=tmp_path)
        assert done.returncode == 0
        assert "--accum-degree N" in done.stdout
    done = gemini("--version", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("gemini ")


def test_an_unknown_option_names_the_nearest(script: Path) -> None:
    done = gemini("--acum-degree", "2", "train.py", cwd=script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gemini_python: unknown option --acum-degree\n    → did you mean --accum-degree?\n"


def test_faults_of_the_configuration_come_before_the_program_all_at_once(script: Path) -> None:
    done = gemini("--accum-degree", "0", "--mode", "sideways", "train.py", cwd=script)
    assert (done.returncode, done.stdout) == (2, "")
    assert "accum_degree" in done.stderr
    assert "sideways" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_without_torch_hears_nothing_of_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    for words in (["--pipeline-degree", "2"], ["--mode", "pipeline", "-q"], []):
        done = gemini(*words, "train.py", cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


@pytest.mark.parametrize(
    ("text", "said"), [("{", "gemini.json"), ('{"accum_degre": 1}', "accum_degree"), ("[]", "gemini.json")]
)
def test_a_malformed_configuration_file(text: str, said: str, script: Path) -> None:
    (script / "gemini.json").write_text(text)
    done = gemini("--config", "gemini.json", "train.py", cwd=script)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_configuration_file_and_a_bad_variable(script: Path) -> None:
    assert gemini("--config", "nope.json", "train.py", cwd=script).returncode == 2
    done = gemini("train.py", cwd=script, GEMINI_CONFIG='{"seed": "x"}')
    assert done.returncode == 2
    assert "seed" in done.stderr


def test_diff_and_dump_do_not_run_the_program(script: Path) -> None:
    done = gemini("--diff", "train.py", cwd=script)
    assert done.returncode == 0
    assert "+x = __gemini__.on(torch.zeros(1)).cuda()" in done.stdout
    assert "ran" not in done.stdout.splitlines()
    done = gemini("--dump", "out", "train.py", cwd=script)
    assert done.returncode == 0
    assert "# the user's" in (script / "out" / "train.py").read_text()


@pytest.mark.parametrize(
    "words", [["--diff", "-c", "1"], ["--dump", "x", "-"], ["--diff", "nope.py"], ["--dump", "/dev/null/x", "train.py"]]
)
def test_dumps_that_cannot_be_made(words: list[str], script: Path) -> None:
    done = gemini(*words, cwd=script)
    assert done.returncode == 2
    assert done.stderr.startswith("gemini_python: ")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in script.iterdir()) == ["train.py"]


def test_no_program_on_a_terminal_is_a_usage_error(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [COMMAND], stdin=terminal, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
        )
    finally:
        os.close(controller)
        os.close(terminal)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: gemini_python")


def test_an_installed_package_that_does_not_exist_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print('ran')")
    done = gemini("--instrument", "no_such_package", "a.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "no_such_package" in done.stderr


def test_pythons_own_help_still_works(tmp_path: Path) -> None:
    done = gemini("--help-env", cwd=tmp_path)
    assert done.returncode == 0
    assert "PYTHONPATH" in done.stdout
