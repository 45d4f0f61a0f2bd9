"""Readings: from the times that several passes read to one time a class of nodes.

A machine that is busy, hot or throttled for a while slows a whole pass. So a reading is taken as the product of the
node's own time and a factor of its pass:

    reading = time of the node × slowness of the pass × noise

The slowness of a pass is the median, over the nodes and weighted by their time, of how their readings compare with
the same nodes' in other passes. Every reading is divided by it, then multiplied by the least of them: disturbances
only ever add time, so the quickest pass is the least disturbed. Of what is left, all readings of all nodes of a class
are summed up by their median.

The calling thread of a GPU is another matter. Between the nodes of a pass it does what it never does in a step, and
comes back to the next node with cold caches. What it needs for a step is therefore read from steps. Passes say how that
is distributed over the nodes or, where a step waits for the thread, runs of the graph in one piece (see `thread`).
Forward and backward run in two threads, on two processors that are disturbed apart, so each is read for itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemini.profiling.measured_device import Times

if TYPE_CHECKING:
    from gemini.profiling.node_classes import NodeClass
    from gemini.profiling.node_timer import PassReading

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


_LEAST = 0.05  # of a reading is left when the overhead is taken off: nothing takes no time
DEVICE, HOST = ("forward", "backward"), ("forward_host", "backward_host")
Readings = dict[int, Times]  # of nodes


@dataclass(frozen=True)
class ClassTimes:
    """The times of a class of nodes."""

    forward: Reading = Reading()
    backward: Reading = Reading()
    forward_host: Reading = Reading()
    backward_host: Reading = Reading()

    @property
    def noise(self) -> float:
        """Of both directions together."""
        total = self.forward.ms + self.backward.ms
        return (self.forward.ms * self.forward.noise + self.backward.ms * self.backward.noise) / total if total else 0.0


def class_times(
    passes: Sequence[PassReading], classes: Iterable[NodeClass], threads: Sequence[Readings] = ()
) -> dict[str, ClassTimes]:
    """The times of every class that was timed, by signature; those of the calling thread from `threads`, if any."""
    clean = [{id_: _without(times, one.overhead) for id_, times in one.times.items()} for one in passes]
    sources = {DEVICE: clean, HOST[:1]: threads or clean, HOST[1:]: threads or clean}
    scales = {parts: _scales(source, parts) for parts, source in sources.items()}
    found = {}
    for one in classes:
        readings = {}
        for parts, scale in scales.items():
            for part in parts:
                values = [
                    getattr(times[id_], part) * factor
                    for times, factor in zip(sources[parts], scale, strict=True)
                    for id_ in one.members
                    if id_ in times
                ]
                readings[part] = summarize(values)
        if readings["forward"].samples:
            found[one.signature] = ClassTimes(**readings)
    return found


def _without(times: Times, overhead: Times) -> Times:
    def less(part: str) -> float:
        read, extra = float(getattr(times, part)), float(getattr(overhead, part))
        return max(_LEAST * read, read - extra)

    return Times(*(less(part) for part in (*DEVICE, *HOST)))


def _scales(passes: Sequence[Readings], parts: tuple[str, ...]) -> list[float]:
    """What to multiply the readings of every pass with."""
    totals = [{id_: sum(getattr(times, part) for part in parts) for id_, times in one.items()} for one in passes]
    nodes: dict[int, list[float]] = {}
    for total in totals:
        for id_, ms in total.items():
            nodes.setdefault(id_, []).append(ms)
    usual = {id_: statistics.median(values) for id_, values in nodes.items()}
    slowness = [
        weighted_median([(ms / usual[id_], usual[id_]) for id_, ms in total.items() if usual[id_] > 0])
        for total in totals
    ]
    known = [value for value in slowness if value > 0]
    return [min(known) / value if value > 0 else 1.0 for value in slowness]


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The value at which half of the weight is reached; 0 where there is none."""
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0


def as_in_steps(
    found: dict[str, ClassTimes],
    counts: dict[str, int],
    step_ms: Sequence[tuple[float, float]],
    *,
    is_limit: bool = False,
) -> dict[str, ClassTimes]:
    """Times of the calling thread that add up to those of steps (forward, backward). `counts` has the nodes of each
    class. Longer than read only where the thread is the limit: one that is ahead of its device is made to wait."""
    factors = {}
    for at, part in enumerate(HOST):
        total = sum(getattr(times, part).ms * counts[name] for name, times in found.items())
        least = min((step[at] for step in step_ms), default=0.0)
        factor = least / total if total and least > 0 else 1.0
        factors[part] = factor if is_limit else min(1.0, factor)
    return {
        name: replace(times, **{p: _scaled(getattr(times, p), factor) for p, factor in factors.items()})
        for name, times in found.items()
    }


def _scaled(reading: Reading, factor: float) -> Reading:
    return replace(reading, ms=reading.ms * factor)
