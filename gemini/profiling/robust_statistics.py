"""Robust statistics: one time out of several readings, some of them disturbed.

Disturbances (another process, a page fault storm, a clock that changes) only ever add time, and they come in
bursts. So readings far above the median are rejected, the rest is summed up by its median, and the spread is the
median absolute deviation: none of the three is moved by a few wild values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

REJECT = 4.0  # readings this many deviations above the median are outliers
_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
_FLOOR = 0.02  # a spread below this share of the median rejects nothing: clocks are not that good


@dataclass(frozen=True)
class Reading:
    """A time in ms: the median of what is left of `samples` readings after `rejected` outliers; `noise` is the
    relative standard deviation of that median, estimated from the spread."""

    ms: float = 0.0
    noise: float = 0.0
    samples: int = 0
    rejected: int = 0


def summarize(readings: Sequence[float]) -> Reading:
    """One reading out of many; an empty sequence is nothing measured."""
    if not readings:
        return Reading()
    middle = statistics.median(readings)
    spread = _SIGMA * _deviation(readings, middle)
    limit = middle + REJECT * max(spread, _FLOOR * middle)
    kept = [value for value in readings if value <= limit]
    ms = statistics.median(kept)
    spread = _SIGMA * _deviation(kept, ms)
    noise = spread / ms / math.sqrt(len(kept)) if ms > 0 else 0.0
    return Reading(ms, noise, len(readings), len(readings) - len(kept))


def _deviation(values: Sequence[float], middle: float) -> float:
    return statistics.median(abs(value - middle) for value in values)
