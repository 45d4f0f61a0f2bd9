"""The clock of trials."""

from __future__ import annotations

import time


class Clock:
    """Time that this process could not do without: on a busy machine, not what it waited for its turn."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def ms(self) -> float:
        """Milliseconds so far."""
        return min(time.perf_counter() - self.wall, time.process_time() - self.cpu) * 1e3
