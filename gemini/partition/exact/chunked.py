"""Chunked cuts: several stages per worker in round-robin order; stage s runs on worker s mod n.

    worker   0  1  2  3  0  1  2  3        two chunks on four workers

Small problems are enumerated. Otherwise cuts move one at a time, each to the position that balances its two workers
best, until none moves; then the cuts within the slack that transfer the fewest bytes. CP-SAT, where installed, moves
all cuts at once within windows around these. The lower bound is the ideal time or the largest item; the gap is
reported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemini.partition.exact.contiguous import ROUNDING, find_fastest
from gemini.partition.exact.cpsat_cuts import optimize_cuts
from gemini.partition.exact.device_order import StageSlots
from gemini.partition.exact.prefix_costs import Floats, SegmentCosts
from gemini.partition.partition_problem import Problem

_FEW = 3000
_ROUNDS = 200
_WEIGHTS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of bytes against balance, when cuts move to positions with fewer bytes
_NEAR = 400  # positions tried on either side of a cut


@dataclass(frozen=True)
class ChunkedCuts:
    """Cuts of an item order over looped slots."""

    costs: SegmentCosts
    at: tuple[int, ...]
    ms: float
    cut_mb: float
    proven: bool  # no cuts of this order are faster


def find_fastest_chunks(costs: SegmentCosts, slots: StageSlots) -> ChunkedCuts | None:
    """Return the fastest cuts found; None if none fit."""
    if _are_few(costs, slots):
        best = min(_enumerate_cuts(costs, slots), key=lambda one: one.ms, default=None)
        return None if best is None else replace(best, proven=True)
    first = find_fastest(costs, slots) or find_fastest(costs, _without_memory_limits(slots))
    if first is None:
        return None
    cuts = _CutMoves(costs, slots).balance(list(first.at))
    starts = (optimize_cuts(costs, slots, cuts), cuts, first.at)
    tried = [evaluate_cuts(costs, slots, one) for one in starts if one is not None]
    return min((one for one in tried if one is not None), key=lambda one: one.ms, default=None)


def find_narrowest_chunks(found: ChunkedCuts, slots: StageSlots, limit: float) -> ChunkedCuts:
    """Return the cuts with the fewest bytes found within a time limit; `found` is within it."""
    costs = found.costs
    if _are_few(costs, slots):
        within = [one for one in _enumerate_cuts(costs, slots) if one.ms <= limit * (1 + ROUNDING)]
        return replace(min(within, key=lambda one: (one.cut_mb, one.ms)), proven=True)
    moves = _CutMoves(costs, slots)
    tried = [found]
    for weight in _WEIGHTS:
        cuts = moves.narrow(moves.trade(list(found.at), weight), limit)
        one = evaluate_cuts(costs, slots, cuts)
        if one is not None and one.ms <= limit * (1 + ROUNDING):
            tried.append(one)
    return min(tried, key=lambda one: (one.cut_mb, one.ms))


def _are_few(costs: SegmentCosts, slots: StageSlots) -> bool:
    return math.comb(costs.size - 1, len(slots) - 1) <= _FEW


def _enumerate_cuts(costs: SegmentCosts, slots: StageSlots) -> Iterator[ChunkedCuts]:
    """Yield all cuts that fit."""
    for inner in itertools.combinations(range(1, costs.size), len(slots) - 1):
        one = evaluate_cuts(costs, slots, (0, *inner, costs.size))
        if one is not None:
            yield one


def evaluate_cuts(costs: SegmentCosts, slots: StageSlots, cuts: Sequence[int]) -> ChunkedCuts | None:
    """Return cuts with their exact time and bytes; None if memory or pins forbid them."""
    problem = costs.problem
    stages = [costs.order[a:b] for a, b in itertools.pairwise(cuts)]
    workers = [slot.worker for slot in slots]
    part_of = worker_of_items(problem, stages, workers)
    if any(item.pin not in (None, part) for item, part in zip(problem.items, part_of, strict=True)):
        return None
    limits = [worker.memory_mb for worker in problem.workers]
    if any(limit is not None for limit in limits):
        used = problem.worker_memory_mb(stages, workers)
        if any(limit is not None and mb > limit * (1 + ROUNDING) for mb, limit in zip(used, limits, strict=True)):
            return None
    return ChunkedCuts(costs, tuple(cuts), max(problem.times(part_of)), problem.cut_mb(part_of), proven=False)


def worker_of_items(problem: Problem, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> list[int]:
    """Return the worker of each item."""
    part_of = [0] * len(problem.items)
    for items, worker in zip(stages, workers, strict=True):
        for item in items:
            part_of[item] = worker
    return part_of


def _without_memory_limits(slots: StageSlots) -> StageSlots:
    return tuple(replace(slot, memory_mb=None) for slot in slots)


Price = Callable[[Floats, Floats], Floats]  # of worker times and bytes, one column per position


class _CutMoves:
    """Moves of single cuts. Times and bytes are per segment: values of a worker's other chunks count as received."""

    def __init__(self, costs: SegmentCosts, slots: StageSlots) -> None:
        self.costs, self.slots = costs, slots
        self.count = len(slots)

    def balance(self, cuts: list[int]) -> list[int]:
        """Move cuts to minimise the speed-weighted sum of squared worker times."""
        speeds = np.array([worker.speed for worker in self.costs.problem.workers])
        return self._descend(cuts, lambda loads, _: (loads**2 * speeds[:, None]).sum(axis=0))

    def trade(self, cuts: list[int], weight: float) -> list[int]:
        """Move cuts to balance times and reduce bytes, both relative to their initial values."""
        speeds = np.array([worker.speed for worker in self.costs.problem.workers])
        scale = float((self._loads(cuts) ** 2 * speeds).sum()) or 1.0
        crossed = sum(float(self._segment(a, b, s)[1][0]) for s, (a, b) in enumerate(itertools.pairwise(cuts)))
        price = weight / (crossed or 1.0) * self.count
        return self._descend(cuts, lambda loads, b: (loads**2 * speeds[:, None]).sum(axis=0) / scale + b * price)

    def narrow(self, cuts: list[int], limit: float) -> list[int]:
        """Move cuts to reduce bytes while no worker exceeds a limit."""
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
        """Move one cut to its cheapest position; it stays on ties."""
        current = cuts[cut]
        places = range(max(cuts[cut - 1] + 1, current - _NEAR), min(cuts[cut + 1] - 1, current + _NEAR) + 1)
        if len(places) < 2:
            return False
        before, after = self._segment(cuts[cut - 1], places, cut - 1), self._segment(places, cuts[cut + 1], cut)
        loads = np.repeat(self._loads(cuts)[:, None], len(places), axis=1)
        at = current - places.start
        for slot, times in ((self.slots[cut - 1], before[0]), (self.slots[cut], after[0])):
            loads[slot.worker] += times - times[at]
        costs = price(loads, before[1] + after[1])
        best = int(np.argmin(costs))
        if not costs[best] < costs[at] * (1 - ROUNDING):
            return False
        cuts[cut] = places[best]
        return True

    def _segment(self, starts: int | range, ends: int | range, stage: int) -> tuple[Floats, Floats]:
        rows = range(starts, starts + 1) if isinstance(starts, int) else starts
        columns = range(ends, ends + 1) if isinstance(ends, int) else ends
        slot = self.slots[stage]
        times = self.costs.times(rows, columns, slot.speed)
        if self.costs.pins:
            times[self.costs.has_foreign_pin(rows, columns, slot.worker)] = np.inf
        return times.ravel(), self.costs.incoming_bytes.window(rows, columns).ravel()

    def _loads(self, cuts: Sequence[int]) -> Floats:
        loads = np.zeros(self.costs.problem.nparts)
        for stage, slot in enumerate(self.slots):
            loads[slot.worker] += self._segment(cuts[stage], cuts[stage + 1], stage)[0][0]
        return loads
