"""Replacing this process by `python`, with the packed program in an unnamed file.

The file is in memory (`memfd_create`), so nothing remains after the program ends, and `python` opens it as /dev/fd/N.
On systems without such files it is a temporary one, which the boot statement removes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_COERCED = "LC_CTYPE"


def exec_python(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the interpreter with `arguments`."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None where the descriptor is closed
            stream.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these signals; the new process must not inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execve(sys.executable, [sys.executable, *arguments], original_environment())


def original_environment() -> dict[str, str]:
    """Return the environment that this process was started with.

    In the C locale Python sets LC_CTYPE at start. The next interpreter would take it for the user's choice of UTF-8 and
    leave its UTF-8 mode off.
    """
    variables = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            original = dict(os.fsdecode(entry).partition("=")[::2] for entry in file.read().split(b"\0") if entry)
    except OSError:
        return variables
    if _COERCED in original:
        variables[_COERCED] = original[_COERCED]
    else:
        variables.pop(_COERCED, None)
    return variables


class ProgramStore:
    """A new file for the packed program: `python` opens `path`, then `descriptor` must be closed."""

    def __init__(self, name: str) -> None:
        self.descriptor = _open_memory_file(name)
        names = [f"{folder}/{self.descriptor}" for folder in ("/dev/fd", "/proc/self/fd")]
        path = next(filter(os.path.exists, names), None)
        if path is None and self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self.path = path or _make_temporary_file(name)

    def write(self, data: bytes) -> None:
        """Write the content of the file."""
        with open(self.path, "wb") as file:
            file.write(data)

    def close(self) -> None:
        """Close and remove the file."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        else:
            os.unlink(self.path)
            os.rmdir(os.path.dirname(self.path))


def _open_memory_file(name: str) -> int | None:
    """Return an inheritable descriptor of a new file in memory, above the standard three, which may be closed."""
    import fcntl

    try:
        first = os.memfd_create(name)
    except (OSError, AttributeError):
        return None
    try:
        return fcntl.fcntl(first, fcntl.F_DUPFD, 3)
    finally:
        os.close(first)


def _make_temporary_file(name: str) -> str:
    import tempfile

    path = os.path.join(tempfile.mkdtemp(prefix="gemini-"), name)
    with open(path, "xb"):
        return path


def feed_standard_input(data: bytes) -> None:
    """Make `data` the standard input of this process and of the one that replaces it."""
    store = ProgramStore("stdin")
    store.write(data)
    descriptor = os.open(store.path, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    store.close()
