"""The best contiguous cuts: one stretch of a line a worker, the slowest worker as fast as can be.

Two dynamic programmes over the cuts, one after the other:

    fastest(…)    least bottleneck
    narrowest(…)  fewest bytes across cuts while no worker takes longer than a limit

Both look only at cuts that a limit on the bottleneck leaves: with a limit T, the work before cut j is at most what j
workers do in T, and what is left at most what the others do. Near the optimum these windows are narrow, so thousands
of items cost little. The limit starts at a bound that ignores memory and communication, found by bisection over a
greedy fill, and is widened until there is an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemini.partition.exact.device_order import Seats
from gemini.partition.exact.prefix_costs import Floats, Ints, Line

ROUNDING = 1e-9  # times within this are equal
_CELLS = 1 << 22  # of a table at a time
_WIDER = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

Reached = tuple[Floats, Floats]  # time and bytes of the best way to each cut


@dataclass(frozen=True)
class Cuts:
    """Where a line is cut, the time of its slowest stretch and the bytes that cross."""

    at: tuple[int, ...]  # 0 first, the number of items last
    ms: float
    nbytes: float = 0.0


def lower_bound(line: Line, seats: Seats) -> float:
    """A bottleneck that no contiguous cuts go below; reached where links are free, and nothing limited or pinned."""
    total = float(line.work[-1])
    low = max(total / sum(seat.speed for seat in seats), _largest(line) / max(seat.speed for seat in seats))
    high = max(low, total / max(seat.speed for seat in seats))
    if _fills(line, seats, low):
        return low
    while high - low > ROUNDING * high / 4:
        middle = (low + high) / 2
        if _fills(line, seats, middle):
            high = middle
        else:
            low = middle
    return low


def _largest(line: Line) -> float:
    return float(np.max(np.diff(line.work), initial=0.0))


def _fills(line: Line, seats: Seats, limit: float) -> bool:
    """Whether stretches within a limit reach the end."""
    at = 0
    for seat in seats:
        at = int(np.searchsorted(line.work, line.work[at] + limit * seat.speed * (1 + ROUNDING), side="right")) - 1
    return at >= line.size


def fastest(line: Line, seats: Seats, worth: float = np.inf) -> Cuts | None:
    """The cuts with the least bottleneck; None if none are possible, or none as fast as `worth`."""
    bound = lower_bound(line, seats)
    last = float(line.work[-1]) / min(seat.speed for seat in seats)
    if line.moving is not None:
        last += float(line.moving.amount.sum())
    for wider in (*_WIDER, np.inf):
        limit = min(bound * (1 + wider) if bound else last, last, worth) * (1 + 4 * ROUNDING)
        found = _Search(line, seats, limit).run()
        if found is not None or limit >= min(worth, last):
            return found
    return None


def narrowest(line: Line, seats: Seats, limit: float) -> Cuts | None:
    """The cuts with the fewest bytes across among those within a limit; of equal ones the fastest."""
    return _Search(line, seats, limit * (1 + ROUNDING), narrow=True).run()


class _Search:
    """One dynamic programme within a limit on the bottleneck."""

    def __init__(self, line: Line, seats: Seats, limit: float, narrow: bool = False) -> None:
        self.line, self.seats, self.limit, self.narrow = line, seats, limit, narrow

    def run(self) -> Cuts | None:
        """The best cuts, if there are any."""
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
        at = [self.line.size]
        for stage in reversed(range(len(self.seats))):
            at.append(int(chosen[stage][at[-1] - windows[stage + 1].start]))
        return Cuts(tuple(reversed(at)), float(reached[0][-1]), float(reached[1][-1]))

    # ── where cuts may be ──────────────────────────────────────────────────────────────────────────────────────
    def _windows(self) -> list[range] | None:
        """Where each cut may be, or None where one has no place."""
        work, count, size = self.line.work, len(self.seats), self.line.size
        total = float(work[-1])
        done = np.concatenate(([0.0], np.cumsum([seat.speed for seat in self.seats]))) * self.limit
        low = np.searchsorted(work, total - (done[-1] - done) - ROUNDING * total, side="left")
        high = np.searchsorted(work, np.minimum(done + ROUNDING * total, total), side="right") - 1
        cuts = np.arange(count + 1)
        low, high = np.maximum(low, cuts), np.minimum(high, size - (count - cuts))
        self._hold_pins(low, high)
        low[count], high[0] = size, 0
        if (low > high).any():
            return None
        return [range(int(first), int(last) + 1) for first, last in zip(low, high, strict=True)]

    def _hold_pins(self, low: Ints, high: Ints) -> None:
        """Cuts before a worker come no later than its first pinned item, cuts behind it no earlier than its last."""
        stage_of = {seat.worker: stage for stage, seat in enumerate(self.seats)}
        if len(stage_of) < len(self.seats):
            return  # a worker with several stages has no single place
        for at, worker in self.line.pins:
            stage = stage_of[worker]
            high[: stage + 1] = np.minimum(high[: stage + 1], at)
            low[stage + 1 :] = np.maximum(low[stage + 1 :], at + 1)

    # ── one stage ──────────────────────────────────────────────────────────────────────────────────────────────
    def _stage(self, stage: int, starts: range, ends: range, before: Reached) -> tuple[Floats, Floats, Ints]:
        """The best way to every end of a stage: its time, its bytes and its start."""
        times, nbytes = np.full(len(ends), np.inf), np.full(len(ends), np.inf)
        chosen = np.zeros(len(ends), dtype=np.int64)
        rows = max(1, _CELLS // len(ends))
        for first in range(starts.start, starts.stop, rows):
            part = range(first, min(first + rows, starts.stop))
            where = slice(part.start - starts.start, part.stop - starts.start)
            time, fewest, best = self._block(stage, part, ends, (before[0][where], before[1][where]))
            better = np.isfinite(time) & ((fewest < nbytes) | ((fewest == nbytes) & (time < times)))
            times[better], nbytes[better], chosen[better] = time[better], fewest[better], part.start + best[better]
        return times, nbytes, chosen

    def _block(self, stage: int, starts: range, ends: range, before: Reached) -> tuple[Floats, Floats, Ints]:
        reached = np.maximum(self._allowed(stage, starts, ends), before[0][:, None])
        fewest = np.zeros(len(ends))
        if self.narrow:
            crossed = self.line.crossing.window(starts, ends) + before[1][:, None]
            crossed[~np.isfinite(reached)] = np.inf
            fewest = crossed.min(axis=0)
            reached[crossed > fewest] = np.inf
        best = reached.argmin(axis=0)
        return reached[best, np.arange(len(ends))], fewest, best

    def _allowed(self, stage: int, starts: range, ends: range) -> Floats:
        """The times of stretches; infinite where they are too long or too large."""
        seat = self.seats[stage]
        found = self.line.times(starts, ends, seat.speed)
        found[found > self.limit] = np.inf
        if self.line.pins:
            found[self.line.barred(starts, ends, seat.worker)] = np.inf
        if seat.memory_mb is not None:
            found[self.line.memory(starts, ends, seat.in_flight) > seat.memory_mb * (1 + ROUNDING)] = np.inf
        return found


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
