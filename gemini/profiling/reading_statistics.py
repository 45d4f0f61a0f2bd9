"""Reading statistics: from the readings of several passes to one robust time per node class.

Disturbances (another process, page faults, a changing clock rate) only add time and come in bursts. So readings far
above the median are rejected, the rest is summarized by its median, and the spread is the median absolute deviation:
outliers move none of these.

A machine that is busy or throttled for a while slows a whole pass. So a reading is modelled as

    reading = time of the node × slowness of the pass × noise

The slowness of a pass is the time-weighted median, over nodes, of its readings relative to the same nodes' readings in
other passes. Readings are divided by it and multiplied by the least slowness, since the fastest pass is the least
disturbed; a class's time is the median over all readings of all its nodes.

Host times of a GPU differ: between the nodes of a pass the calling thread does extra work and has cold caches. So their
total is taken from steps, and passes or, for host-bound steps, runs of the whole graph (see `host_time`) distribute it
over nodes. Forward and backward run in two threads, disturbed separately, so each is scaled separately.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemini.profiling.measured_device import NodeTimes

if TYPE_CHECKING:
    from gemini.profiling.node_classes import NodeClass
    from gemini.profiling.node_timer import PassTimes

REJECT = 4.0  # deviations above the median beyond which a reading is an outlier
_SIGMA = 1.4826  # standard deviation ÷ median absolute deviation of a normal distribution
_FLOOR = 0.02  # least spread as a share of the median: the resolution of clocks


@dataclass(frozen=True)
class Reading:
    """A time in ms: the median of `samples` readings without `rejected` outliers; `noise` is the relative standard
    deviation of that median, estimated from the spread."""

    ms: float = 0.0
    noise: float = 0.0
    samples: int = 0
    rejected: int = 0


def summarize(readings: Sequence[float]) -> Reading:
    """Summarize readings robustly; an empty sequence gives an empty reading."""
    if not readings:
        return Reading()
    middle = statistics.median(readings)
    spread = _SIGMA * _deviation(readings, middle)
    limit = middle + REJECT * max(spread, _FLOOR * middle)
    accepted = [value for value in readings if value <= limit]
    ms = statistics.median(accepted)
    spread = _SIGMA * _deviation(accepted, ms)
    noise = spread / ms / math.sqrt(len(accepted)) if ms > 0 else 0.0
    return Reading(ms, noise, len(readings), len(readings) - len(accepted))


def _deviation(values: Sequence[float], middle: float) -> float:
    return statistics.median(abs(value - middle) for value in values)


_LEAST = 0.05  # least share of a reading that remains without the overhead
DEVICE, HOST = ("forward", "backward"), ("forward_host", "backward_host")
Readings = dict[int, NodeTimes]  # by node id


@dataclass(frozen=True)
class ClassTimes:
    """The times of a node class."""

    forward: Reading = Reading()
    backward: Reading = Reading()
    forward_host: Reading = Reading()
    backward_host: Reading = Reading()

    @property
    def noise(self) -> float:
        """Relative noise of both directions together."""
        total = self.forward.ms + self.backward.ms
        return (self.forward.ms * self.forward.noise + self.backward.ms * self.backward.noise) / total if total else 0.0


def class_times(
    passes: Sequence[PassTimes], classes: Iterable[NodeClass], threads: Sequence[Readings] = ()
) -> dict[str, ClassTimes]:
    """Return the times of every timed class, by signature; host times from `threads`, if any."""
    clean = [{id_: _subtract_overhead(times, one.overhead) for id_, times in one.times.items()} for one in passes]
    sources = {DEVICE: clean, HOST[:1]: threads or clean, HOST[1:]: threads or clean}
    scales = {parts: _pass_scales(source, parts) for parts, source in sources.items()}
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


def _subtract_overhead(times: NodeTimes, overhead: NodeTimes) -> NodeTimes:
    def less(part: str) -> float:
        read, extra = float(getattr(times, part)), float(getattr(overhead, part))
        return max(_LEAST * read, read - extra)

    return NodeTimes(*(less(part) for part in (*DEVICE, *HOST)))


def _pass_scales(passes: Sequence[Readings], parts: tuple[str, ...]) -> list[float]:
    """Return the factor for the readings of every pass."""
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
    """Return the value at which half of the weight is reached; 0 without values."""
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    return 0.0


def scale_to_steps(
    found: dict[str, ClassTimes],
    counts: dict[str, int],
    step_ms: Sequence[tuple[float, float]],
    *,
    is_limit: bool = False,
) -> dict[str, ClassTimes]:
    """Scale host times to add up to those of steps (forward, backward); `counts` has the nodes of each class. Times
    grow only where steps are host-bound, since a thread ahead of its device also waits in a step."""
    factors = {}
    for at, part in enumerate(HOST):
        total = sum(getattr(times, part).ms * counts[name] for name, times in found.items())
        least = min((step[at] for step in step_ms), default=0.0)
        factor = least / total if total and least > 0 else 1.0
        factors[part] = factor if is_limit else min(1.0, factor)
    return {
        name: replace(times, **{p: _scale(getattr(times, p), factor) for p, factor in factors.items()})
        for name, times in found.items()
    }


def _scale(reading: Reading, factor: float) -> Reading:
    return replace(reading, ms=reading.ms * factor)
