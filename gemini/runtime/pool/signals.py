"""Signals: handlers of the script (Ctrl-C) are deferred while a worker request is under way, as by any operator.

A Python signal handler may raise between any two instructions. Raised between a request and its reply, it would leave
a reply that no thread expects, or a worker that still writes to buffers that the script has restored. Handlers
therefore run after the request: immediately if the worker is quick, after `GRACE` seconds, with the worker ended, if
it is not. A second Ctrl-C is not deferred.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_signal: Any = importlib.import_module("_signal")  # `signal` wraps results in enumerations: ten times slower
GRACE = 5.0  # seconds for which a signal is deferred
_SIGNALS = [int(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1)]


class DeferredSignals:
    """`with DeferredSignals():` handlers of the script run when the block ends. Costs microseconds; may be nested."""

    _is_outermost = False

    def __enter__(self) -> DeferredSignals:
        if _current[0] is not None or threading.get_ident() != threading.main_thread().ident:
            return self
        self.pending: list[int] = []
        self._before: list[tuple[int, Any]] = []
        for number in _SIGNALS:
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
        if self.pending:
            note_user_code()
            handlers = dict(self._before)
            for number in dict.fromkeys(self.pending):
                handlers[number](number, sys._getframe(1))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)
        if self.pending.count(signal.SIGINT) > 1:
            handlers = dict(self._before)
            self.pending = []
            self._restore()
            note_user_code()
            handlers[number](number, frame)

    def _restore(self) -> None:
        self._is_outermost, _current[0] = False, None
        for number, handler in self._before:
            if _signal.getsignal(number) == self._note:  # else the script has set another one meanwhile
                _signal.signal(number, handler)


_user_code_runs = [0]
_current: list[DeferredSignals | None] = [None]  # of the main thread, the only one in which handlers run


def has_pending_signal() -> bool:
    """Return whether a signal waits for the end of a block."""
    deferred = _current[0]
    return deferred is not None and bool(deferred.pending)


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
