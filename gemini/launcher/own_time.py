"""Own time: what Gemini itself has cost a program, and what it may cost.

    allowed    2 s + 5 % of the script's processor time so far
    spent      start, trials, planning, workers: measured, or estimated before it begins

A phase begins only if its estimate fits. So a program that stays local never takes longer than 1.05 × `python` + 2 s,
whatever is found out about it on the way, and a short one is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOWED_S = 2.0
_SHARE = 0.05
_START_S = 0.7  # of `gemini_python` until the first call of a model


class OwnTime:
    """The time that Gemini has spent in a process, in seconds of processor time."""

    def __init__(self) -> None:
        self.spent_s = _START_S
        self._began = time.process_time()

    @property
    def allowed_s(self) -> float:
        """The time that may be spent by now."""
        program_s = max(0.0, time.process_time() - self._began - (self.spent_s - _START_S))
        return _ALLOWED_S + _SHARE * program_s

    def fits(self, estimate_s: float) -> bool:
        """Return whether a phase with this estimate may begin now."""
        return self.spent_s + estimate_s <= self.allowed_s

    def seconds_left(self) -> float:
        """Return how long a phase that begins now may take."""
        return self.allowed_s - self.spent_s

    def add(self, seconds: float) -> None:
        """Record time that other processes spend for this one."""
        self.spent_s += seconds

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Record the time of the block."""
        began = time.process_time()
        try:
            yield
        finally:
            self.spent_s += time.process_time() - began
