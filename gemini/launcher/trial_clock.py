"""The clock of trials: what a step would take if nothing else ran on this machine."""

from __future__ import annotations

import time

import torch


class Clock:
    """The time of the calling thread, which takes part in all that a CPU computes; not what it waited for its turn.

    Other devices have threads of their own in backward: there the time of the whole process counts, at most the wall's.
    """

    def __init__(self) -> None:
        self.own = time.process_time if torch.cuda.is_initialized() else time.thread_time
        self.wall, self.cpu = time.perf_counter(), self.own()

    def ms(self) -> float:
        """Milliseconds so far."""
        return min(time.perf_counter() - self.wall, self.own() - self.cpu) * 1e3
