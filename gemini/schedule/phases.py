"""Warm-up, steady state and cool-down of a schedule, read off its start times.

A schedule is in its steady state while every block that starts has a twin one kernel later (or earlier): block
`gid` of micro-batch `m` at time `t`, and of micro-batch `m + n` at `t + L`.

    time   0        t0    t0+L   t0+2L         t1       end
           │warm-up │kernel│kernel│ …   kernel │cool-down│

The analysis reads only the blocks and their times, so it applies to composed plans, to schedules of the library,
and to plans loaded from a file or from another tool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from gemini.schedule.block import Number
from gemini.schedule.schedplan import SchedPlan

MOST_MICROS_IN_A_KERNEL = 16
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Phases:
    """The steady state: `kernels` kernels of `length`, each of `nmicros` micro-batches, run in `[begin, end)`."""

    begin: Number
    end: Number
    length: Number
    nmicros: int
    kernels: int

    @property
    def period(self) -> float:
        """Time per micro-batch in the steady state."""
        return self.length / self.nmicros


def find_phases(plan: SchedPlan) -> Phases | None:
    """The longest steady state of `plan`; `None` where nothing repeats.

    A plan with a `pattern` needs to show one whole kernel; without one, two kernels make a repetition.
    """
    search = _Search(plan)
    if plan.pattern is not None:
        return search.window(plan.pattern.nmicros, plan.pattern.length, at_least=1)
    for nmicros in range(1, min(MOST_MICROS_IN_A_KERNEL, plan.nmicros // 2) + 1):
        length = search.commonest_distance(nmicros)
        found = search.window(nmicros, length, at_least=2) if length is not None else None
        if found is not None:
            return found
    return None


class _Search:
    """The start times of a plan, indexed for finding twins and counting the starts in a window."""

    def __init__(self, plan: SchedPlan) -> None:
        self.starts = {(block.gid or 0, block.mid): plan.step(block) for block in plan.all_blocks()}
        self.in_order = sorted((start, gid) for (gid, _), start in self.starts.items())
        self.times = [start for start, _ in self.in_order]
        self.gids = {gid for gid, _ in self.starts}
        self.end = plan.nsteps
        self.slack = _ROUNDING * max(1.0, float(self.end))

    def commonest_distance(self, nmicros: int) -> Number | None:
        """The most frequent time between a block and its twin `nmicros` micro-batches later."""
        seen: Counter[float] = Counter()
        for (gid, mid), start in self.starts.items():
            later = self.starts.get((gid, mid + nmicros))
            if later is not None and later > start:
                seen[round(later - start, 9)] += 1
        if not seen:
            return None
        most = max(seen.values())
        return min(length for length, count in seen.items() if count == most)

    def window(self, nmicros: int, length: Number, at_least: int) -> Phases | None:
        """The longest `[begin, end)` of whole kernels in which blocks have their twins; `None` if below `at_least`."""
        without_next = self._without_twin(nmicros, length)
        without_previous = self._without_twin(-nmicros, -length)
        best: Phases | None = None
        for begin in sorted(set(self.times)):
            stop_next = self._first_from(without_next, begin) + length
            stop_previous = self._first_from(without_previous, begin + length)
            kernels = int((min(stop_next, stop_previous) - begin + self.slack) // length)
            longer = kernels >= (best.kernels + 1 if best else at_least)
            if longer and self._is_kernel(begin, length, nmicros):
                best = Phases(begin, begin + kernels * length, length, nmicros, kernels)
        return best

    def _without_twin(self, nmicros: int, distance: Number) -> list[Number]:
        lonely = []
        for (gid, mid), start in self.starts.items():
            twin = self.starts.get((gid, mid + nmicros))
            if twin is None or abs(twin - start - distance) > self.slack:
                lonely.append(start)
        return sorted(lonely)

    def _first_from(self, sorted_times: list[Number], time: Number) -> Number:
        index = bisect_left(sorted_times, time - self.slack)
        return sorted_times[index] if index < len(sorted_times) else self.end

    def _is_kernel(self, begin: Number, length: Number, nmicros: int) -> bool:
        """Whether every block of the model starts exactly `nmicros` times in `[begin, begin + length)`."""
        first = bisect_left(self.times, begin - self.slack)
        last = bisect_left(self.times, begin + length - self.slack)
        counts = Counter(gid for _, gid in self.in_order[first:last])
        return counts.keys() == self.gids and set(counts.values()) == {nmicros}
