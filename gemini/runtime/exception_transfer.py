"""Exception transfer: an exception raised in a worker is raised in the script as the same class.

Many exceptions do not survive pickling: their constructor takes other arguments than it passes on, or they hold a lock
or a socket. An exception is therefore tried as it is and, if that fails or changes its text, rebuilt without its
constructor; then without the parts that cannot be pickled; at last as its nearest built-in base class.
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
    """An exception to be created without its constructor."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    state: dict[str, Any]

    def build(self) -> BaseException:
        """Return the exception."""
        base = next(one for one in self.kind.__mro__ if one.__module__ == "builtins")
        found: BaseException = base.__new__(self.kind, *self.args)
        found.args = self.args
        found.__dict__.update(self.state)
        return found


def rebuild(sent: BaseException | ExceptionData) -> BaseException:
    """Return the exception that was sent."""
    return sent.build() if isinstance(sent, ExceptionData) else sent


def to_portable(error: BaseException, classes: ClassTable) -> BaseException | ExceptionData:
    """Return the best form of an exception that survives the transfer."""
    for form in _forms(error, classes):
        if _survives(form, error, classes):
            return form
    return to_builtin(error)


def to_builtin(error: BaseException) -> ExceptionData:
    """Return the nearest built-in class, with the text only."""
    base = next(one for one in type(error).__mro__ if getattr(builtins, one.__name__, None) is one)
    return ExceptionData(base, (f"{type(error).__qualname__}: {safe_text(error)}",), {})


def safe_text(error: BaseException) -> str:
    """Return the text of an exception, or a placeholder if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return f"<no text: its __str__ raised {sys.exc_info()[0].__name__}>"  # type: ignore[union-attr]


def raising_line(trace: str) -> str:
    """Return the innermost line outside torch and Gemini in the text of a traceback.

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
    args = tuple(one if _is_picklable(one, classes) else repr(one)[:500] for one in error.args)
    yield ExceptionData(type(error), args, {key: one for key, one in state.items() if _is_picklable(one, classes)})
    yield ExceptionData(type(error), (safe_text(error),), {})


def _is_picklable(value: Any, classes: ClassTable) -> bool:
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
