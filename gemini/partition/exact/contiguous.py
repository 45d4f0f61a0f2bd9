"""Contiguous cuts: one segment of an item order per worker, with the least bottleneck.

Two dynamic programs over the cuts:

    find_fastest(…)    least bottleneck
    find_narrowest(…)  fewest bytes across cuts while no worker exceeds a time limit

Both consider only cuts that a limit T on the bottleneck admits: the work before cut j is at most what the first j
workers do in T, and the rest at most what the remaining workers do. Near the optimum these windows are narrow, so
thousands of items are cheap. The limit starts at a bound that ignores memory and communication, found by bisection over
a greedy fill, and is widened until cuts are found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemini.partition.exact.device_order import StageSlots
from gemini.partition.exact.prefix_costs import Floats, Ints, SegmentCosts

ROUNDING = 1e-9  # times within this are equal
_CELLS = 1 << 22  # of a table computed at once
_WIDER = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

Reached = tuple[Floats, Floats]  # time and bytes of the best prefix that ends at each cut


@dataclass(frozen=True)
class Cuts:
    """The cut positions, the time of the slowest segment and the bytes across cuts."""

    at: tuple[int, ...]  # 0 first, the number of items last
    ms: float
    nbytes: float = 0.0


def bottleneck_bound(costs: SegmentCosts, slots: StageSlots) -> float:
    """Return a lower bound on the bottleneck, tight where links are free and nothing is limited or pinned."""
    total = float(costs.work[-1])
    low = max(total / sum(slot.speed for slot in slots), _largest(costs) / max(slot.speed for slot in slots))
    high = max(low, total / max(slot.speed for slot in slots))
    if _can_fill(costs, slots, low):
        return low
    while high - low > ROUNDING * high / 4:
        middle = (low + high) / 2
        if _can_fill(costs, slots, middle):
            high = middle
        else:
            low = middle
    return low


def _largest(costs: SegmentCosts) -> float:
    return float(np.max(np.diff(costs.work), initial=0.0))


def _can_fill(costs: SegmentCosts, slots: StageSlots, limit: float) -> bool:
    """Return whether segments within a limit reach the end."""
    at = 0
    for slot in slots:
        at = int(np.searchsorted(costs.work, costs.work[at] + limit * slot.speed * (1 + ROUNDING), side="right")) - 1
    return at >= costs.size


def find_fastest(costs: SegmentCosts, slots: StageSlots, worth: float = np.inf) -> Cuts | None:
    """Return the cuts with the least bottleneck; None if there are none, or none as fast as `worth`."""
    bound = bottleneck_bound(costs, slots)
    last = float(costs.work[-1]) / min(slot.speed for slot in slots)
    if costs.transfer_ms is not None:
        last += float(costs.transfer_ms.amount.sum())
    for wider in (*_WIDER, np.inf):
        limit = min(bound * (1 + wider) if bound else last, last, worth) * (1 + 4 * ROUNDING)
        found = _CutSearch(costs, slots, limit).run()
        if found is not None or limit >= min(worth, last):
            return found
    return None


def find_narrowest(costs: SegmentCosts, slots: StageSlots, limit: float) -> Cuts | None:
    """Return the cuts with the fewest bytes among those within a limit; the fastest of equal ones."""
    return _CutSearch(costs, slots, limit * (1 + ROUNDING), narrow=True).run()


class _CutSearch:
    """One dynamic program within a limit on the bottleneck."""

    def __init__(self, costs: SegmentCosts, slots: StageSlots, limit: float, narrow: bool = False) -> None:
        self.costs, self.slots, self.limit, self.narrow = costs, slots, limit, narrow

    def run(self) -> Cuts | None:
        """Return the best cuts, if any."""
        windows = self._windows()
        if windows is None:
            return None
        reached: Reached = (np.zeros(1), np.zeros(1))
        chosen = []
        for stage, starts in enumerate(windows[:-1]):
            times, nbytes, before = self._stage(stage, starts, windows[stage + 1], reached)
            reached = times, nbytes
            if not np.isfinite(times).any():
                return None
            chosen.append(before)
        at = [self.costs.size]
        for stage in reversed(range(len(self.slots))):
            at.append(int(chosen[stage][at[-1] - windows[stage + 1].start]))
        return Cuts(tuple(reversed(at)), float(reached[0][-1]), float(reached[1][-1]))

    # ── windows of cuts ──────────────────────────────────────────────────────────────────────────────────────────────
    def _windows(self) -> list[range] | None:
        """Return the admissible positions of each cut, or None if a cut has none."""
        work, count, size = self.costs.work, len(self.slots), self.costs.size
        total = float(work[-1])
        done = np.concatenate(([0.0], np.cumsum([slot.speed for slot in self.slots]))) * self.limit
        low = np.searchsorted(work, total - (done[-1] - done) - ROUNDING * total, side="left")
        high = np.searchsorted(work, np.minimum(done + ROUNDING * total, total), side="right") - 1
        cuts = np.arange(count + 1)
        low, high = np.maximum(low, cuts), np.minimum(high, size - (count - cuts))
        self._apply_pins(low, high)
        low[count], high[0] = size, 0
        if (low > high).any():
            return None
        return [range(int(first), int(last) + 1) for first, last in zip(low, high, strict=True)]

    def _apply_pins(self, low: Ints, high: Ints) -> None:
        """Keep cuts before a worker's first pinned item, and cuts behind it after its last."""
        stage_of = {slot.worker: stage for stage, slot in enumerate(self.slots)}
        if len(stage_of) < len(self.slots):
            return  # a worker with several stages has no single position
        for at, worker in self.costs.pins:
            stage = stage_of[worker]
            high[: stage + 1] = np.minimum(high[: stage + 1], at)
            low[stage + 1 :] = np.maximum(low[stage + 1 :], at + 1)

    # ── one stage ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stage(self, stage: int, starts: range, ends: range, before: Reached) -> tuple[Floats, Floats, Ints]:
        """Return the best prefix for every end of a stage: its time, its bytes and the start of the stage."""
        times, nbytes = np.full(len(ends), np.inf), np.full(len(ends), np.inf)
        chosen = np.zeros(len(ends), dtype=np.int64)
        rows = max(1, _CELLS // len(ends))
        for first in range(starts.start, starts.stop, rows):
            part = range(first, min(first + rows, starts.stop))
            where = slice(part.start - starts.start, part.stop - starts.start)
            time, fewest, best = self._stage_rows(stage, part, ends, (before[0][where], before[1][where]))
            better = np.isfinite(time) & ((fewest < nbytes) | ((fewest == nbytes) & (time < times)))
            times[better], nbytes[better], chosen[better] = time[better], fewest[better], part.start + best[better]
        return times, nbytes, chosen

    def _stage_rows(self, stage: int, starts: range, ends: range, before: Reached) -> tuple[Floats, Floats, Ints]:
        reached = np.maximum(self._segment_times(stage, starts, ends), before[0][:, None])
        fewest = np.zeros(len(ends))
        if self.narrow:
            crossed = self.costs.incoming_bytes.window(starts, ends) + before[1][:, None]
            crossed[~np.isfinite(reached)] = np.inf
            fewest = crossed.min(axis=0)
            reached[crossed > fewest] = np.inf
        best = reached.argmin(axis=0)
        return reached[best, np.arange(len(ends))], fewest, best

    def _segment_times(self, stage: int, starts: range, ends: range) -> Floats:
        """Return the times of segments; infinite where they exceed the time or memory limit or contradict pins."""
        slot = self.slots[stage]
        found = self.costs.times(starts, ends, slot.speed)
        found[found > self.limit] = np.inf
        if self.costs.pins:
            found[self.costs.has_foreign_pin(starts, ends, slot.worker)] = np.inf
        if slot.memory_mb is not None:
            found[self.costs.memory(starts, ends, slot.in_flight) > slot.memory_mb * (1 + ROUNDING)] = np.inf
        return found


def find_fitting_cuts(costs: SegmentCosts, slots: StageSlots, extra: float = 0.0) -> list[int] | None:
    """Return cuts with every worker within its memory limit plus `extra` MB; None if there are none.

    The memory of a segment grows with its length, so filling the workers greedily decides it.
    """
    cuts, at = [0], 0
    for stage, slot in enumerate(slots):
        most = costs.size - (len(slots) - stage - 1)
        if at >= most:
            return None
        if slot.memory_mb is None:
            at = most
        else:
            row = costs.memory(range(at, at + 1), range(at + 1, most + 1), slot.in_flight)[0]
            fitting = int((row <= slot.memory_mb + extra).sum())
            if not fitting:
                return None
            at += fitting
        cuts.append(at)
    return cuts if at == costs.size else None
