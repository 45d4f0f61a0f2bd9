"""Becoming `python`: the packed program in a file without a name, and the command line that runs it.

The file lives in memory (`memfd_create`), so that nothing is left behind however the program ends, and `python` opens
it as /dev/fd/N. Where the system has no such files a temporary one is used, which the program removes first thing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_COERCED = "LC_CTYPE"


def become(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the interpreter with `arguments`."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is where the descriptor was closed
            stream.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these; what it starts should not inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execve(sys.executable, [sys.executable, *arguments], environment())


def environment() -> dict[str, str]:
    """The environment this process was given.

    In the C locale Python sets LC_CTYPE for its children when it starts. Handed on, the variable would make the next
    interpreter believe that the user had chosen UTF-8, and it would leave its UTF-8 mode off.
    """
    given = dict(os.environ)
    try:
        with open("/proc/self/environ", "rb") as file:
            original = dict(os.fsdecode(entry).partition("=")[::2] for entry in file.read().split(b"\0") if entry)
    except OSError:
        return given
    if _COERCED in original:
        given[_COERCED] = original[_COERCED]
    else:
        given.pop(_COERCED, None)
    return given


class Store:
    """A new file for the packed program; `path` is what `python` opens, `descriptor` what must be closed after it."""

    def __init__(self, name: str) -> None:
        self.descriptor = _nameless(name)
        names = [f"{folder}/{self.descriptor}" for folder in ("/dev/fd", "/proc/self/fd")]
        path = next(filter(os.path.exists, names), None)
        if path is None and self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        self.path = path or _temporary(name)

    def write(self, data: bytes) -> None:
        """Fill the file."""
        with open(self.path, "wb") as file:
            file.write(data)

    def close(self) -> None:
        """Give the file up."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        else:
            os.unlink(self.path)
            os.rmdir(os.path.dirname(self.path))


def _nameless(name: str) -> int | None:
    """An inheritable descriptor, above the standard three (which may be closed), of a new file in memory."""
    import fcntl

    try:
        first = os.memfd_create(name)
    except (OSError, AttributeError):
        return None
    try:
        return fcntl.fcntl(first, fcntl.F_DUPFD, 3)
    finally:
        os.close(first)


def _temporary(name: str) -> str:
    import tempfile

    path = os.path.join(tempfile.mkdtemp(prefix="gemini-"), name)
    with open(path, "xb"):
        return path


def feed_standard_input(data: bytes) -> None:
    """Make `data` what this process, and the one it becomes, reads on standard input."""
    store = Store("stdin")
    store.write(data)
    descriptor = os.open(store.path, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    store.close()
