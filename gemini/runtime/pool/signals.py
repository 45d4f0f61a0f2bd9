"""Interrupts: a signal of the program (Ctrl-C) waits while a worker is being asked, as it waits for any operator.

A signal handler of Python may raise between any two instructions. Raised between sending a request and taking its
reply, it would leave a reply that nobody expects, or a worker that still writes to buffers the program believes it has
put right. So handlers run after the request: at once if the worker is quick, after `GRACE` seconds, with the worker
ended, if it is not. Whoever presses Ctrl-C a second time does not wait.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_signal: Any = importlib.import_module("_signal")  # `signal` makes enumerations of all it returns: ten times slower
GRACE = 5.0  # seconds for which a signal waits
_HELD = [int(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1)]


class DeferredSignals:
    """`with Held():` — handlers of the program run when the block ends. Costs microseconds; may be nested."""

    _is_outermost = False

    def __enter__(self) -> DeferredSignals:
        if _current[0] is not None or threading.get_ident() != threading.main_thread().ident:
            return self
        self.noted: list[int] = []
        self._before: list[tuple[int, Any]] = []
        for number in _HELD:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._before.append((number, handler))
        try:
            self._is_outermost, _current[0] = True, self
            for number, _ in self._before:
                _signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._is_outermost:
            return
        self._restore()
        if self.noted:
            note_user_code()
            handlers = dict(self._before)
            for number in dict.fromkeys(self.noted):
                handlers[number](number, sys._getframe(1))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)
        if self.noted.count(signal.SIGINT) > 1:
            handlers = dict(self._before)
            self.noted = []
            self._restore()
            note_user_code()
            handlers[number](number, frame)

    def _restore(self) -> None:
        self._is_outermost, _current[0] = False, None
        for number, handler in self._before:
            if _signal.getsignal(number) == self._note:  # else the program has set another one meanwhile
                _signal.signal(number, handler)


_user_code_runs = [0]
_current: list[DeferredSignals | None] = [None]  # of the main thread, the only one in which handlers run


def has_pending_signal() -> bool:
    """Whether a signal waits for the end of a block."""
    held = _current[0]
    return held is not None and bool(held.noted)


def note_user_code() -> None:
    """Record that user code runs during a step: a signal handler, or a stream or filter that gets a worker's output."""
    _user_code_runs[0] += 1


def count_user_code_runs() -> int:
    """Return how often it has run: facts about the script read at another count may be outdated."""
    return _user_code_runs[0]


def _forget_in_child() -> None:
    if _current[0] is not None:
        _current[0]._restore()


os.register_at_fork(after_in_child=_forget_in_child)
