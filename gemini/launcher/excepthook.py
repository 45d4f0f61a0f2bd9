"""Exception hook: prints uncaught exceptions as `python` does, without frames of Gemini.

Hooks that the program sets itself stay in place; `--strict` shows every frame.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any


def install() -> None:
    """Install the hooks for the program and its threads."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = show_in_thread


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception; the value of `sys.excepthook`."""
    found = _remove_own_frames(error, trace)
    sys.__excepthook__(kind, error, found)


def show_in_thread(args: Any) -> None:
    """Print an exception of a thread; the value of `threading.excepthook`."""
    if args.exc_value is not None:
        _remove_own_frames(args.exc_value, args.exc_traceback)
    threading.__excepthook__(args)


def _remove_own_frames(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    with suppress(Exception):  # falls back to the full traceback
        from gemini.runtime.tracebacks import strip_frames

        if error.__traceback__ is trace:
            return strip_frames(error)
    return trace
