"""Segment costs: items in one order, and the cost of every segment [start, end) of it.

Compute time is additive, so prefix sums suffice. Shared amounts are not: a value counts once in a segment that reads
but does not produce it, a parameter once in a segment that uses it. For a value produced at p and read at r and r', the
amount is a step function: a segment starting in (p, r] pays if it ends after r, one starting in (r, r'] if it ends
after r'.

             end ►  …  r  r+1 … r' r'+1 …
    start     p+1   ·   ·   1    1   1
      ▼        r    ·   ·   1    1   1
              r+1   ·   ·   ·    ·   1
               r'   ·   ·   ·    ·   1

So each reader is one rectangle in the plane of starts and ends, and the costs of all segments in a window are two
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
class SharedCosts:
    """Amounts that a segment pays once if it starts in [low, high] and ends after high."""

    low: Ints
    high: Ints
    amount: Floats

    def window(self, starts: range, ends: range) -> Floats:
        """Return the amounts of the segments in a window, one row per start and one column per end."""
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


class SegmentCosts:
    """The items of a problem in one order, with the costs of its segments."""

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
    def foreign_pins(self) -> dict[int, Floats]:
        """For every worker, the number of items before each position that are pinned to another worker."""
        pinned = [self.problem.items[item].pin for item in self.order]
        return {
            worker: _prefix(float(pin not in (None, worker)) for pin in pinned) for worker in range(self.problem.nparts)
        }

    @cached_property
    def incoming_bytes(self) -> SharedCosts:
        """Bytes that a segment receives from before it, with gradients; whole numbers, so that sums are exact."""
        return self._value_costs([float(round(value.mb * MB)) for value in self.problem.values])

    @cached_property
    def transfer_ms(self) -> SharedCosts | None:
        """Time to transfer these bytes, where links have a cost: uniform, or that of the cheapest link."""
        problem = self.problem
        if problem.options.links.free or problem.nparts < 2:
            return None
        workers = range(problem.nparts)
        pairs = [(a, b) for a in workers for b in workers if a != b]
        if not isinstance(problem.options.links.latency, tuple) and not isinstance(
            problem.options.links.bandwidth, tuple
        ):
            pairs = pairs[:1]
        return self._value_costs(
            [min(problem.transfer_ms(at, *pair) for pair in pairs) for at in range(len(problem.values))]
        )

    @cached_property
    def weights(self) -> SharedCosts:
        """MB of parameters with gradients and optimizer state."""
        users: dict[str, list[int]] = {}
        for at, item in enumerate(self.order):
            for name in self.problem.items[item].parameters:
                users.setdefault(name, []).append(at)
        return _make_shared_costs((-1, where, self.problem.parameter_state_mb(name)) for name, where in users.items())

    @cached_property
    def saved_mb(self) -> SharedCosts:
        """MB of shared values saved for backward, whole batch."""
        users: dict[int, list[int]] = {}
        for at, item in enumerate(self.order):
            for value in self.problem.items[item].saved_values:
                users.setdefault(value, []).append(at)
        return _make_shared_costs((-1, where, self.problem.saved_mb[value]) for value, where in users.items())

    @cached_property
    def own_saved_mb(self) -> Floats:
        """MB saved for backward by single items, as a prefix sum."""
        return _prefix(self.problem.items[item].saved_own_mb for item in self.order)

    @cached_property
    def peaks(self) -> Floats:
        """Peak working MB of each item."""
        return np.array([self.problem.items[item].peak_mb for item in self.order])

    def memory(self, starts: range, ends: range, in_flight: int) -> Floats:
        """Return `Problem.memory_mb` of the segments in a window."""
        count = self.problem.options.micro_batches
        saved = self.saved_mb.window(starts, ends) + _differences(self.own_saved_mb, starts, ends)
        peaks = np.zeros((len(starts), len(ends)))
        for row, start in enumerate(starts):
            if start < ends.stop - 1:
                most = np.maximum.accumulate(self.peaks[start : ends.stop - 1])
                first = max(start + 1, ends.start)  # the first end of a non-empty segment
                peaks[row, first - ends.start :] = most[first - start - 1 :]
        return self.weights.window(starts, ends) + saved * (min(in_flight, count) / count) + peaks / count

    def times(self, starts: range, ends: range, speed: float) -> Floats:
        """Return the times of the segments in a window; infinite for empty segments."""
        found = _differences(self.work, starts, ends) / speed
        if self.transfer_ms is not None:
            found += self.transfer_ms.window(starts, ends)
        if starts.stop > ends.start:
            found[np.array(starts)[:, None] >= np.array(ends)[None, :]] = np.inf
        return found

    def has_foreign_pin(self, starts: range, ends: range, worker: int) -> npt.NDArray[np.bool_]:
        """Return which segments contain an item pinned to another worker."""
        found: npt.NDArray[np.bool_] = _differences(self.foreign_pins[worker], starts, ends) > 0
        return found

    def _value_costs(self, amounts: list[float]) -> SharedCosts:
        place = self.position
        return _make_shared_costs(
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


def _make_shared_costs(shared: Iterable[tuple[int, list[int], float]]) -> SharedCosts:
    low: list[int] = []
    high: list[int] = []
    amount: list[float] = []
    for before, where, size in shared:
        for at in where:
            low.append(before + 1)
            high.append(at)
            amount.append(size)
            before = at
    return SharedCosts(
        np.array(low, dtype=np.int64), np.array(high, dtype=np.int64), np.array(amount, dtype=np.float64)
    )
