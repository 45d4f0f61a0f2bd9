"""The line: items in one order, and what every stretch [start, end) of them costs.

Work adds up, so prefix sums price it. What is shared does not: a value counts once in a stretch that reads it and
does not make it, a parameter once in a stretch that uses it. For one that is made at p and read at r, r', both counts
are steps: a stretch that starts in (p, r] pays once it ends after r, one that starts in (r, r'] once it ends after r'.

             end ►  …  r  r+1 … r' r'+1 …
    start     p+1   ·   ·   1    1   1
      ▼        r    ·   ·   1    1   1
              r+1   ·   ·   ·    ·   1
               r'   ·   ·   ·    ·   1

So each reader is one rectangle in the plane of starts and ends, and the prices of all stretches of a window are two
cumulative sums over the corners of rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gemini.partition.partition_problem import MB, Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """Amounts that a stretch pays once if it starts in [low, high] and ends after high."""

    low: Ints
    high: Ints
    amount: Floats

    def window(self, starts: range, ends: range) -> Floats:
        """What the stretches of a window pay, a row a start and a column an end."""
        grid = np.zeros((len(starts) + 1) * len(ends))
        used = (self.high >= starts.start) & (self.low < starts.stop) & (self.high + 1 < ends.stop)
        low, high, amount = self.low[used], self.high[used], self.amount[used]
        column = np.maximum(high + 1, ends.start) - ends.start
        first = (np.maximum(low, starts.start) - starts.start) * len(ends) + column
        last = (np.minimum(high + 1, starts.stop) - starts.start) * len(ends) + column
        grid += np.bincount(first, amount, grid.size)
        grid -= np.bincount(last, amount, grid.size)
        table = grid.reshape(len(starts) + 1, len(ends))[:-1]
        return np.cumsum(np.cumsum(table, axis=0), axis=1)


class Line:
    """The items of a problem in one order."""

    def __init__(self, problem: Problem, order: tuple[int, ...]) -> None:
        self.problem, self.order = problem, order
        self.size = len(order)
        self.position = [0] * self.size
        for at, item in enumerate(order):
            self.position[item] = at
        self.work = _prefix(problem.items[item].ms for item in order)
        pins = ((at, problem.items[item].pin) for at, item in enumerate(order))
        self.pins = [(at, pin) for at, pin in pins if pin is not None]

    @cached_property
    def forbidden(self) -> dict[int, Floats]:
        """For every worker, how many items before a place are pinned to another one."""
        pinned = [self.problem.items[item].pin for item in self.order]
        return {
            worker: _prefix(float(pin not in (None, worker)) for pin in pinned) for worker in range(self.problem.nparts)
        }

    @cached_property
    def crossing(self) -> Steps:
        """Bytes that a stretch needs from before it, both directions; whole numbers, so that sums are exact."""
        return self._read([float(round(value.mb * MB)) for value in self.problem.values])

    @cached_property
    def moving(self) -> Steps | None:
        """Milliseconds for them, where links have a price; the same between all workers, or the cheapest."""
        problem = self.problem
        if problem.options.links.free or problem.nparts < 2:
            return None
        workers = range(problem.nparts)
        pairs = [(a, b) for a in workers for b in workers if a != b]
        if not isinstance(problem.options.links.latency, tuple) and not isinstance(
            problem.options.links.bandwidth, tuple
        ):
            pairs = pairs[:1]
        return self._read([min(problem.transfer_ms(at, *pair) for pair in pairs) for at in range(len(problem.values))])

    @cached_property
    def weights(self) -> Steps:
        """MB of parameters with gradients and optimizer."""
        users: dict[str, list[int]] = {}
        for at, item in enumerate(self.order):
            for name in self.problem.items[item].parameters:
                users.setdefault(name, []).append(at)
        return _steps((-1, where, self.problem.held_mb(name)) for name, where in users.items())

    @cached_property
    def kept(self) -> Steps:
        """MB of shared values kept for backward, the whole batch."""
        users: dict[int, list[int]] = {}
        for at, item in enumerate(self.order):
            for value in self.problem.items[item].saved_values:
                users.setdefault(value, []).append(at)
        return _steps((-1, where, self.problem.saved_mb[value]) for value, where in users.items())

    @cached_property
    def own(self) -> Floats:
        """MB that items alone keep for backward, as a prefix sum."""
        return _prefix(self.problem.items[item].saved_own_mb for item in self.order)

    @cached_property
    def peaks(self) -> Floats:
        """MB that each item takes while it runs."""
        return np.array([self.problem.items[item].peak_mb for item in self.order])

    def memory(self, starts: range, ends: range, in_flight: int) -> Floats:
        """What `Problem.memory_mb` says of the stretches of a window."""
        count = self.problem.options.micro_batches
        kept = self.kept.window(starts, ends) + _differences(self.own, starts, ends)
        peaks = np.zeros((len(starts), len(ends)))
        for row, start in enumerate(starts):
            if start < ends.stop - 1:
                most = np.maximum.accumulate(self.peaks[start : ends.stop - 1])
                first = max(start + 1, ends.start)  # the first end that leaves something in the stretch
                peaks[row, first - ends.start :] = most[first - start - 1 :]
        return self.weights.window(starts, ends) + kept * (min(in_flight, count) / count) + peaks / count

    def times(self, starts: range, ends: range, speed: float) -> Floats:
        """The time of the stretches of a window; infinite where there is nothing in them."""
        found = _differences(self.work, starts, ends) / speed
        if self.moving is not None:
            found += self.moving.window(starts, ends)
        if starts.stop > ends.start:
            found[np.array(starts)[:, None] >= np.array(ends)[None, :]] = np.inf
        return found

    def barred(self, starts: range, ends: range, worker: int) -> npt.NDArray[np.bool_]:
        """Which stretches hold an item that is pinned to another worker."""
        found: npt.NDArray[np.bool_] = _differences(self.forbidden[worker], starts, ends) > 0
        return found

    def _read(self, amounts: list[float]) -> Steps:
        place = self.position
        return _steps(
            (place[producer], sorted(place[reader] for reader in readers), amount)
            for (producer, readers), amount in zip(self.problem.readers, amounts, strict=True)
            if amount
        )


def _prefix(amounts: Iterable[float]) -> Floats:
    found: Any = np.concatenate(([0.0], np.cumsum(np.fromiter(amounts, dtype=np.float64))))
    return found  # type: ignore[no-any-return]


def _differences(prefix: Floats, starts: range, ends: range) -> Floats:
    found: Floats = prefix[ends.start : ends.stop][None, :] - prefix[starts.start : starts.stop][:, None]
    return found


def _steps(shared: Iterable[tuple[int, list[int], float]]) -> Steps:
    low: list[int] = []
    high: list[int] = []
    amount: list[float] = []
    for before, where, size in shared:
        for at in where:
            low.append(before + 1)
            high.append(at)
            amount.append(size)
            before = at
    return Steps(np.array(low, dtype=np.int64), np.array(high, dtype=np.int64), np.array(amount, dtype=np.float64))
