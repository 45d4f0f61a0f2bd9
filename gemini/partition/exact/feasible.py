"""Filling: whether contiguous cuts fit the memory of the workers at all.

What a stretch of items holds only grows with the stretch, so filling each worker in turn as far as it goes tells.
"""

from __future__ import annotations

from gemini.partition.exact.device_order import Seats
from gemini.partition.exact.prefix_costs import Line


def fill(line: Line, seats: Seats, extra: float = 0.0) -> list[int] | None:
    """Cuts that leave every worker within its limit and `extra` more; None if there are none."""
    cuts, at = [0], 0
    for stage, seat in enumerate(seats):
        most = line.size - (len(seats) - stage - 1)
        if at >= most:
            return None
        if seat.memory_mb is None:
            at = most
        else:
            row = line.memory(range(at, at + 1), range(at + 1, most + 1), seat.in_flight)[0]
            fitting = int((row <= seat.memory_mb + extra).sum())
            if not fitting:
                return None
            at += fitting
        cuts.append(at)
    return cuts if at == line.size else None
