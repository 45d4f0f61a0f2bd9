"""Run a small project under `python` and under `gemini_python` and compare the results."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

PYTHON = [sys.executable]
GEMINI = [sys.executable, str(Path(sys.executable).with_name("gemini_python"))]  # its first line may say python3


@dataclass(frozen=True)
class Case:
    """A project, given as its files, and a command line; ``{}`` in it is the project's folder."""

    name: str
    argv: list[str] = field(default_factory=lambda: ["main.py"])
    files: dict[str, str | bytes] = field(default_factory=dict)
    stdin: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    since: tuple[int, int] = (3, 10)
    torch: bool = False
    unordered: bool = False

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def script(name: str, text: str, *args: str, **more: object) -> Case:
    """A case of one file, main.py."""
    return Case(name, ["main.py", *args], {"main.py": text}, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str
    files: tuple[str, ...]


def run(command: list[str], case: Case, folder: Path, timeout: float = 60, fresh: bool = True) -> Outcome:
    """The outcome of `case` in a `fresh` folder, or in one that an earlier run has left, under `command`."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        case.write(folder)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_"))}
    env |= {key: value.replace("{}", str(folder)) for key, value in case.env.items()}
    done = subprocess.run(
        [*command, *(word.replace("{}", str(folder)) for word in case.argv)],
        cwd=folder,
        env=env,
        input=None if case.stdin is None else case.stdin.encode(),
        stdin=subprocess.DEVNULL if case.stdin is None else None,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    left = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
    return Outcome(done.returncode, _plain(done.stdout, case), _plain(done.stderr, case), left)


def _plain(output: bytes, case: Case) -> str:
    """Output without what differs from run to run: addresses, process ids."""
    text = output.decode(errors="backslashreplace")
    text = re.sub(r"0x[0-9a-f]{6,}", "0x…", text)
    text = re.sub(r"(?<=pid=)\d+|(?<=Process )\d+", "…", text)
    return "".join(sorted(text.splitlines(keepends=True))) if case.unordered else text


def both(case: Case, folder: Path, timeout: float = 60) -> tuple[Outcome, Outcome]:
    return run(PYTHON, case, folder, timeout), run(GEMINI, case, folder, timeout)
