"""Launching a program leaves no files behind, and an internal fault costs a log line, not the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import GEMINI, PYTHON, Case, run, script

from gemini.launcher.process.program_file import Request
from gemini.launcher.process.stdlib_patch import patch_expression

ENDS = {
    "end": "print('x')",
    "exit": "import sys; sys.exit(3)",
    "raise": "1/0",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at-once": "import os; os._exit(0)",
    "syntax-error": "x =",
}


def without_memory_files(folder: Path) -> list[str]:
    """`gemini_python` on a system that has no files in memory."""
    program = folder / "launcher.py"
    program.write_text("import os\ndel os.memfd_create\nfrom gemini.cli.python import main\nmain()\n")
    return [sys.executable, str(program)]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("in_memory", [True, False])
def test_no_temporary_file_remains(end: str, in_memory: bool, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    case = script("end", ENDS[end], env={"TMPDIR": str(temporary)})
    command = GEMINI if in_memory else without_memory_files(tmp_path)
    expected = run(PYTHON, case, tmp_path / "project")
    assert run(command, case, tmp_path / "project") == expected
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("argv", [["main.py", "x"], ["-m", "main"], ["-c", "import main"]])
def test_without_files_in_memory_all_is_the_same(argv: list[str], tmp_path: Path) -> None:
    text = "import sys\nprint(__name__, __file__, sys.argv, sys.path[0], sys.orig_argv[1:])\n1/0"
    case = Case("temporary", argv, {"main.py": text})
    assert run(without_memory_files(tmp_path), case, tmp_path / "project") == run(PYTHON, case, tmp_path / "project")


def test_the_process_keeps_its_id_and_names_its_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('ready', flush=True); sys.stdin.read()")
    with subprocess.Popen(
        [*GEMINI, "train.py", "--epochs", "3"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        words = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert any("train.py" in word for word in words)
        assert words[-3:-1] == ["--epochs", "3"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == -signal.SIGINT


def test_a_pipe_is_run_by_plain_python(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"print('from a pipe')\nx = = 1\n")
    os.close(writing)
    done = subprocess.run(
        [*GEMINI, f"/dev/fd/{reading}"], pass_fds=[reading], capture_output=True, text=True, timeout=60, check=False
    )
    os.close(reading)
    assert done.returncode == 1
    assert "is not a regular file" in done.stderr
    assert "x = = 1" in done.stderr


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_closed_streams_stay_closed(closed: list[int], tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import os, sys\nwith open('seen', 'w') as f:\n"
        "    print(sys.stdin is None, sys.stdout is None, sys.stderr is None, file=f)\n"
    )
    seen = []
    for command in (PYTHON, GEMINI):
        words = " ".join([*command, "main.py", *(f"{stream}>&-" for stream in closed)])
        done = subprocess.run(["sh", "-c", f"exec {words}"], cwd=tmp_path, timeout=60, check=False)
        seen.append((done.returncode, (tmp_path / "seen").read_text()))
    assert seen[0] == seen[1]


def test_a_removed_working_directory(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("print('runs')")
    gone = tmp_path / "gone"
    outputs = []
    for command in (PYTHON, GEMINI):
        gone.mkdir()
        words = " ".join([*command, str(tmp_path / "main.py")])
        done = subprocess.run(
            ["sh", "-c", f"rmdir {gone}; exec {words}"],
            cwd=gone,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        outputs.append((done.returncode, done.stdout))
    assert outputs[0] == outputs[1] == (0, "runs\n")


def test_where_no_file_may_grow_plain_python_runs_the_program(tmp_path: Path) -> None:
    limited = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
    limited += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from gemini.cli.python import main; main()"
    done = run([sys.executable, "-c", limited], script("limited", "print('ran')"), tmp_path / "project")
    assert (done.code, done.stdout) == (0, "ran\n")
    assert "File too large; running under plain python" in done.stderr


def test_links_to_scripts(tmp_path: Path) -> None:
    project = tmp_path / "project"
    outputs = []
    for command in (PYTHON, GEMINI):
        case = Case(
            "link",
            ["link.py"],
            {"real/main.py": "import sys, beside; print(__file__, sys.path[0])", "real/beside.py": ""},
        )
        program = [
            sys.executable,
            "-c",
            "import os, sys; os.symlink('real/main.py', 'link.py'); os.execv(sys.argv[1], sys.argv[1:])",
        ]
        outputs.append(run([*program, *command], case, project))
    assert outputs[0] == outputs[1]


def test_a_compiled_script(tmp_path: Path) -> None:
    import py_compile

    source = tmp_path / "source.py"
    source.write_text("import sys; print(__name__, __file__, sys.argv, type(__loader__)); 1/0")
    data = Path(py_compile.compile(str(source), str(tmp_path / "main.pyc"))).read_bytes()
    for name in ("main.pyc", "main"):
        case = Case("compiled", [name, "x"], {name: data})
        assert run(GEMINI, case, tmp_path / "project") == run(PYTHON, case, tmp_path / "project")


def test_optimization_comes_from_flags_and_environment() -> None:
    assert Request(letters="uOBO").optimize() == 2
    assert Request(letters="OOO").optimize() == 2
    assert Request(letters="E").optimize() == 0


def _sample(text: str) -> str:
    return text.upper()


def test_respelling_refuses_what_it_does_not_recognise() -> None:
    code = _sample.__code__
    assert not patch_expression(_sample, "text.upper()", "text.lower()")  # not a function of the library
    assert _sample.__code__ is code
    import runpy

    function = runpy._get_code_from_file
    before = function.__code__
    assert not patch_expression(function, "no such text", "")
    assert not patch_expression(function, "f", "g")
    assert function.__code__ is before
