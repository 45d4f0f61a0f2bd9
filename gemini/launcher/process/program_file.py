"""The program of a command line, read by the rules of `python`.

script      a source file: its bytes, and the absolute path that its `__file__` and its tracebacks show
container   a directory or zip file with a `__main__`
module      -m
command     -c
stdin       the source comes on standard input
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib.util import MAGIC_NUMBER

_ZIP_END = b"PK\x05\x06"
_ZIP_TAIL = 22 + 65535


@dataclass
class Request:
    """The part of a command line that `python` would receive.

    `kind` is ``script``, ``module``, ``command``, ``stdin`` or ``nothing``. `typed` is everything before the
    program's arguments; `flags` are its interpreter flags, and `letters` those without a value.
    """

    kind: str = "nothing"
    target: str = ""
    args: list[str] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    letters: str = ""

    def arguments(self) -> list[str]:
        """Return the arguments of `python` for the same run."""
        return [*self.typed, *self.args]

    def optimize(self) -> int:
        """Return the optimization level of the program."""
        from_environment = 0 if set("EI") & set(self.letters) else sys.flags.optimize
        return min(2, max(self.letters.count("O"), from_environment))


@dataclass(frozen=True)
class Program:
    """A program as `python` starts it; `data` is its source, empty for containers and modules."""

    kind: str
    name: str
    filename: str
    data: bytes
    file: str | None
    argv: list[str]
    path0: str | None


def read_program(request: Request) -> Program | None:
    """Return the program of `request`; None if it can run, or fail, only under plain `python`."""
    try:
        return {"script": _script, "module": _module, "command": _command, "stdin": _stdin}[request.kind](request)
    except (OSError, ValueError):
        return None


def _script(request: Request) -> Program | None:
    path = os.path.join(os.getcwd(), request.target)
    if request.target in ("", ".") and sys.version_info >= (3, 11):
        path = os.getcwd()
    argv = [request.target, *request.args]
    if os.path.isdir(path):
        return Program("container", request.target, path, b"", None, argv, path)
    if not os.path.isfile(path) and os.path.exists(path):
        return Program("pipe", request.target, path, b"", path, argv, None)
    with open(path, "rb") as file:
        data = file.read()
    if _ZIP_END in data[-_ZIP_TAIL:] and _is_zip(path):
        return Program("container", request.target, path, b"", None, argv, path)
    if path.endswith(".pyc") or data[:2] == MAGIC_NUMBER[:2]:
        return None
    if "x" in request.letters:
        data = b"\n" + data.partition(b"\n")[2]
    return Program("script", request.target, path, data, path, argv, os.path.dirname(_resolve(path)))


def _is_zip(path: str) -> bool:
    import zipimport

    try:
        zipimport.zipimporter(path)
    except ImportError:
        return False
    return True


def _resolve(path: str) -> str:
    try:
        return os.path.realpath(path, strict=True)
    except OSError:  # a pipe under /dev/fd is a broken link
        return path


def _module(request: Request) -> Program:
    return Program("module", f"-m {request.target}", "", b"", None, ["-m", *request.args], _find_working_directory())


def _find_working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # removed: Python adds no entry to the path
        return None


def _command(request: Request) -> Program:
    return Program("command", "-c", "<string>", request.target.encode(), None, ["-c", *request.args], "")


def _stdin(request: Request) -> Program | None:
    if "i" in request.letters or os.isatty(0):
        return None
    chunks = []
    while chunk := os.read(0, 1 << 20):
        chunks.append(chunk)
    return Program("stdin", "-", "<stdin>", b"".join(chunks), "<stdin>", [request.target, *request.args], "")
