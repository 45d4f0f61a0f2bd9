"""Exceptions on the way: what a unit raises in a worker is raised in the program as the same class.

Many exceptions do not survive pickling: their constructor wants other arguments than it passes on, or they hold a lock
or a socket. So an exception is tried as it is and, where that fails or changes its text, rebuilt without its
constructor; then without what cannot travel; at last as the nearest class above it that every Python has.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gemini.runtime.transport.serialization import ClassTable, pack, unpack

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


class ExceptionData(NamedTuple):
    """An exception to be made without its constructor."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def made(self) -> BaseException:
        """The exception."""
        base = next(one for one in self.kind.__mro__ if one.__module__ == "builtins")
        found: BaseException = base.__new__(self.kind, *self.args)
        found.args = self.args
        found.__dict__.update(self.state)
        return found


def rebuild(sent: BaseException | ExceptionData) -> BaseException:
    """The exception that was sent."""
    return sent.made() if isinstance(sent, ExceptionData) else sent


def to_portable(error: BaseException, classes: ClassTable) -> BaseException | ExceptionData:
    """The best form of an exception that survives the journey."""
    for form in _forms(error, classes):
        if _survives(form, error, classes):
            return form
    return to_builtin(error)


def to_builtin(error: BaseException) -> ExceptionData:
    """The nearest built-in class, with the text and nothing else."""
    base = next(one for one in type(error).__mro__ if getattr(builtins, one.__name__, None) is one)
    return ExceptionData(base, (f"{type(error).__qualname__}: {safe_text(error)}",), {})


def safe_text(error: BaseException) -> str:
    """Its text; what to say instead where it has none to give."""
    try:
        return str(error)
    except Exception:
        return f"<no text: its __str__ raised {sys.exc_info()[0].__name__}>"  # type: ignore[union-attr]


def raising_line(trace: str) -> str:
    """The line of the model that raised, from the text of a traceback: the innermost that is not torch's.

    A module of torch itself has no other lines; what raises outside Python has none.
    """
    lines = trace.splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    found: list[tuple[str, str]] = []
    for at in range(begins[-1] + 1 if begins else len(lines), len(lines)):
        if not lines[at].startswith("  "):
            break  # the exception itself
        frame = _FRAME.fullmatch(lines[at])
        if frame is not None and not frame["file"].startswith(_OURS):
            source = lines[at + 1].strip() if lines[at + 1].startswith("    ") else ""
            place = f"{frame['file']}:{frame['line']}, in {frame['name']}"
            found.append((frame["file"], f"{place}: {source}" if source else place))
    users = [text for file, text in found if not file.startswith(_TORCH)]
    return [*[text for _, text in found], *users][-1] if found else ""


def _forms(error: BaseException, classes: ClassTable) -> Iterator[BaseException | ExceptionData]:
    state = dict(vars(error))
    yield error
    yield ExceptionData(type(error), error.args, state)
    args = tuple(one if _travels(one, classes) else repr(one)[:500] for one in error.args)
    yield ExceptionData(type(error), args, {key: one for key, one in state.items() if _travels(one, classes)})
    yield ExceptionData(type(error), (safe_text(error),), {})


def _travels(value: Any, classes: ClassTable) -> bool:
    try:
        body, tensors = pack(value, classes)
        unpack(body, tensors, classes)
        return True
    except Exception:
        return False


def _survives(form: BaseException | ExceptionData, error: BaseException, classes: ClassTable) -> bool:
    try:
        body, tensors = pack(form, classes)
        found = rebuild(unpack(body, tensors, classes))
        return type(found) is type(error) and (isinstance(form, ExceptionData) or safe_text(found) == safe_text(error))
    except Exception:
        return False
