"""Several stages a worker, in turn: stage s runs on worker s mod n, and a worker's time is that of all its stages.

    worker   0  1  2  3  0  1  2  3        two chunks on four workers

Where there are few ways to cut, all are tried. Else cuts move one at a time, each to the place that balances its two
workers best, until none moves; then those within the slack that cross the fewest bytes. CP-SAT, where it is installed,
moves all cuts at once within windows around these. The bound is the ideal, or the largest item: how far the answer may
be off is stated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemini.partition.exact.contiguous import ROUNDING, fastest
from gemini.partition.exact.cpsat_cuts import joint_cuts
from gemini.partition.exact.device_order import Seats
from gemini.partition.exact.prefix_costs import Floats, Line
from gemini.partition.partition_problem import Problem

_FEW = 3000
_ROUNDS = 200
_WEIGHTS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of bytes against balance, when cuts are moved to narrow places
_NEAR = 400  # places on either side that a cut is tried at


@dataclass(frozen=True)
class Chunks:
    """Cuts of a line over looped seats."""

    line: Line
    at: tuple[int, ...]
    ms: float
    cut_mb: float
    proven: bool  # that no cuts of this line are faster


def fastest_chunks(line: Line, seats: Seats) -> Chunks | None:
    """The fastest cuts found; None if none fit."""
    if _are_few(line, seats):
        best = min(_all(line, seats), key=lambda one: one.ms, default=None)
        return None if best is None else replace(best, proven=True)
    first = fastest(line, seats) or fastest(line, _unlimited(seats))
    if first is None:
        return None
    cuts = _Moves(line, seats).balance(list(first.at))
    tried = [_judged(line, seats, one) for one in (joint_cuts(line, seats, cuts), cuts, first.at) if one is not None]
    return min((one for one in tried if one is not None), key=lambda one: one.ms, default=None)


def narrowest_chunks(found: Chunks, seats: Seats, limit: float) -> Chunks:
    """Of the cuts within a limit, those with the fewest bytes that are found; `found` is within it."""
    line = found.line
    if _are_few(line, seats):
        within = [one for one in _all(line, seats) if one.ms <= limit * (1 + ROUNDING)]
        return replace(min(within, key=lambda one: (one.cut_mb, one.ms)), proven=True)
    moves = _Moves(line, seats)
    tried = [found]
    for weight in _WEIGHTS:
        cuts = moves.narrow(moves.trade(list(found.at), weight), limit)
        one = _judged(line, seats, cuts)
        if one is not None and one.ms <= limit * (1 + ROUNDING):
            tried.append(one)
    return min(tried, key=lambda one: (one.cut_mb, one.ms))


def _are_few(line: Line, seats: Seats) -> bool:
    return math.comb(line.size - 1, len(seats) - 1) <= _FEW


def _all(line: Line, seats: Seats) -> Iterator[Chunks]:
    """All cuts that fit."""
    for inner in itertools.combinations(range(1, line.size), len(seats) - 1):
        one = _judged(line, seats, (0, *inner, line.size))
        if one is not None:
            yield one


def _judged(line: Line, seats: Seats, cuts: Sequence[int]) -> Chunks | None:
    """Cuts with their true time and bytes; None if memory or pins forbid them."""
    problem = line.problem
    stages = [line.order[a:b] for a, b in itertools.pairwise(cuts)]
    workers = [seat.worker for seat in seats]
    part_of = parts(problem, stages, workers)
    if any(item.pin not in (None, part) for item, part in zip(problem.items, part_of, strict=True)):
        return None
    limits = [worker.memory_mb for worker in problem.workers]
    if any(limit is not None for limit in limits):
        used = problem.memories(stages, workers)
        if any(limit is not None and mb > limit * (1 + ROUNDING) for mb, limit in zip(used, limits, strict=True)):
            return None
    return Chunks(line, tuple(cuts), max(problem.times(part_of)), problem.cut_mb(part_of), proven=False)


def parts(problem: Problem, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> list[int]:
    """The worker of each item."""
    part_of = [0] * len(problem.items)
    for items, worker in zip(stages, workers, strict=True):
        for item in items:
            part_of[item] = worker
    return part_of


def _unlimited(seats: Seats) -> Seats:
    return tuple(replace(seat, memory_mb=None) for seat in seats)


Price = Callable[[Floats, Floats], Floats]  # of the times of workers and the bytes, a column a place


class _Moves:
    """Moves of single cuts. Times and bytes are those of stretches: what a worker has from its other chunk counts."""

    def __init__(self, line: Line, seats: Seats) -> None:
        self.line, self.seats = line, seats
        self.count = len(seats)

    def balance(self, cuts: list[int]) -> list[int]:
        """Cuts after moves that bring the times of workers closer together: their squares, by speed, are least then."""
        speeds = np.array([worker.speed for worker in self.line.problem.workers])
        return self._descend(cuts, lambda loads, _: (loads**2 * speeds[:, None]).sum(axis=0))

    def trade(self, cuts: list[int], weight: float) -> list[int]:
        """Cuts after moves that make times more equal and bytes fewer; both count relative to what they are now."""
        speeds = np.array([worker.speed for worker in self.line.problem.workers])
        scale = float((self._loads(cuts) ** 2 * speeds).sum()) or 1.0
        crossed = sum(float(self._stretch(a, b, s)[1][0]) for s, (a, b) in enumerate(itertools.pairwise(cuts)))
        price = weight / (crossed or 1.0) * self.count
        return self._descend(cuts, lambda loads, b: (loads**2 * speeds[:, None]).sum(axis=0) / scale + b * price)

    def narrow(self, cuts: list[int], limit: float) -> list[int]:
        """Cuts after moves that make bytes fewer while no worker exceeds a limit."""
        return self._descend(
            cuts, lambda loads, crossed: np.where(loads.max(axis=0) > limit * (1 + ROUNDING), np.inf, crossed)
        )

    def _descend(self, cuts: list[int], price: Price) -> list[int]:
        for _ in range(_ROUNDS):
            moved = False
            for cut in range(1, self.count):
                moved |= self._move(cuts, cut, price)
            if not moved:
                break
        return cuts

    def _move(self, cuts: list[int], cut: int, price: Price) -> bool:
        """Put one cut where it costs least; of equal places where it is."""
        here = cuts[cut]
        places = range(max(cuts[cut - 1] + 1, here - _NEAR), min(cuts[cut + 1] - 1, here + _NEAR) + 1)
        if len(places) < 2:
            return False
        before, after = self._stretch(cuts[cut - 1], places, cut - 1), self._stretch(places, cuts[cut + 1], cut)
        loads = np.repeat(self._loads(cuts)[:, None], len(places), axis=1)
        at = here - places.start
        for seat, times in ((self.seats[cut - 1], before[0]), (self.seats[cut], after[0])):
            loads[seat.worker] += times - times[at]
        costs = price(loads, before[1] + after[1])
        best = int(np.argmin(costs))
        if not costs[best] < costs[at] * (1 - ROUNDING):
            return False
        cuts[cut] = places[best]
        return True

    def _stretch(self, starts: int | range, ends: int | range, stage: int) -> tuple[Floats, Floats]:
        rows = range(starts, starts + 1) if isinstance(starts, int) else starts
        columns = range(ends, ends + 1) if isinstance(ends, int) else ends
        seat = self.seats[stage]
        times = self.line.times(rows, columns, seat.speed)
        if self.line.pins:
            times[self.line.barred(rows, columns, seat.worker)] = np.inf
        return times.ravel(), self.line.crossing.window(rows, columns).ravel()

    def _loads(self, cuts: Sequence[int]) -> Floats:
        loads = np.zeros(self.line.problem.nparts)
        for stage, seat in enumerate(self.seats):
            loads[seat.worker] += self._stretch(cuts[stage], cuts[stage + 1], stage)[0][0]
        return loads
