"""Showing: an exception that nobody caught is printed as `python` prints it, without frames of ours.

What the program sets in the place of these hooks is left alone; `--strict` shows every frame.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any


def install() -> None:
    """Have exceptions that end the program, or a thread of it, shown without frames of ours."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = show_in_thread


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What `sys.excepthook` does."""
    found = _cut(error, trace)
    sys.__excepthook__(kind, error, found)


def show_in_thread(args: Any) -> None:
    """What `threading.excepthook` does."""
    if args.exc_value is not None:
        _cut(args.exc_value, args.exc_traceback)
    threading.__excepthook__(args)


def _cut(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    with suppress(Exception):  # the traceback as it is will do
        from gemini.runtime.tracebacks import cut

        if error.__traceback__ is trace:
            return cut(error)
    return trace
