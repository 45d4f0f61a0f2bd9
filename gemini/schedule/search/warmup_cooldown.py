"""Warm-up and cool-down: a whole schedule of N micro-batches around a steady state.

Following the steady state's order and letting every block start as early as that order allows is always possible, and
never gets shorter with more micro-batches. Often it can be shortened by *justification*: schedule everything as late as
possible, backwards in time and in the order just found; then as early as possible again in the resulting order:

    follow        F0 F1 F2 .  .  B0 F3 B1 W0 .  B2 W1 …
    backwards        F0 F1 .  F2 B0 .  …            every block against the end
    forwards      F0 F1 F2 F3 .  B0 B1 W0 B2 …      every block against the start

Each pass is a list schedule under the same memory limits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gemini.schedule.block import Number
from gemini.schedule.bounds import makespan_bound, work_bound
from gemini.schedule.placement_problem import PlacementProblem, fits
from gemini.schedule.search.kernel import Kernel
from gemini.schedule.search.list_scheduler import Listing, Starts, list_schedule
from gemini.schedule.search.sequential import find_order

_PATIENCE = 100
_MOST_LONGER_HORIZONS = 3
_MOST_ROUNDS = 3
# Blocks × micro-batches up to which a whole schedule is justified, for one and for all rounds together; compared with
# known schedules; started from their rules; and compared with longer horizons.
_MOST_BLOCKS = 150_000
_MOST_BLOCKS_IN_ALL_ROUNDS = 60_000
_MOST_BLOCKS_FOR_KNOWN = 20_000
_MOST_BLOCKS_FOR_RULES = 1_500
_MOST_BLOCKS_FOR_HORIZONS = 1_500


Known = Callable[[int], Iterable[Sequence[Sequence[Number]]]]
"""Start times (only their order counts) of schedules from the library, for a number of micro-batches."""


@dataclass(frozen=True)
class Ramp:
    """A whole schedule and the least makespan that is possible."""

    listing: Listing
    bound: int


class Ramps:
    """Whole schedules of one problem around one kernel, for any number of micro-batches."""

    def __init__(self, problem: PlacementProblem, kernel: Kernel, known: Known | None = None) -> None:
        self.problem = problem
        self.kernel = kernel
        self.known = known
        self.reference = find_order(problem).order
        self.backwards = _reverse_time(problem)
        self._found: dict[int, Listing] = {}

    def schedule(self, nmicros: int) -> Ramp:
        """The shortest schedule found; never shorter than that of fewer micro-batches.

        The result of a longer horizon may be shorter. Only the next few can be (each adds at least the work of the
        busiest device), so these are tried too, and truncated if they are.
        """
        bound = makespan_bound(self.problem, nmicros)
        best = self._direct(nmicros)
        longer = min(_MOST_LONGER_HORIZONS, (best.makespan - bound) // work_bound(self.problem))
        for more in range(nmicros + 1, nmicros + longer + 1):
            if best.makespan <= bound or more * self.problem.nblocks > _MOST_BLOCKS_FOR_HORIZONS:
                break
            cut = self._truncate(self._direct(more), nmicros)
            if cut.makespan < best.makespan:
                best = cut
        return Ramp(best, bound)

    def follow(self, nmicros: int) -> Listing:
        """The kernel's own order, every block as early as that order allows."""
        kernel, size = self.kernel, self.problem.nblocks
        wished = [
            [
                kernel.starts[(mid % kernel.copies) * size + block] + mid // kernel.copies * kernel.length
                for mid in range(nmicros)
            ]
            for block in range(size)
        ]
        return compact_listing(self.problem, wished)

    def _direct(self, nmicros: int) -> Listing:
        if nmicros not in self._found:
            self._found[nmicros] = self._search(nmicros)
        return self._found[nmicros]

    def _search(self, nmicros: int) -> Listing:
        best = self.follow(nmicros)
        bound = makespan_bound(self.problem, nmicros)
        size = nmicros * self.problem.nblocks
        if best.makespan > bound and size <= _MOST_BLOCKS:
            best = self._justify(best, bound)
        if best.makespan > bound and self.known is not None and size <= _MOST_BLOCKS_FOR_KNOWN:
            for starts in self.known(nmicros):
                listing = compact_listing(self.problem, starts)
                if listing.makespan < best.makespan and within_memory(self.problem, listing.starts):
                    best = listing
        if best.makespan > bound and size <= _MOST_BLOCKS_FOR_RULES:
            for priority in _rules(self.problem, nmicros):
                start = list_schedule(self.problem, priority, self.reference, _PATIENCE)
                if start is not None:
                    found = self._justify(start, bound)
                    best = min(best, found, key=lambda listing: listing.makespan)
        return best

    def _justify(self, listing: Listing, bound: int) -> Listing:
        best = listing
        size = self.problem.nblocks * len(listing.starts[0])
        for _ in range(min(_MOST_ROUNDS, max(1, _MOST_BLOCKS_IN_ALL_ROUNDS // size))):
            back = list_schedule(self.backwards, _mirror(self.problem, listing).starts, self.reference[::-1], _PATIENCE)
            if back is None:
                break
            late = _mirror(self.problem, back)
            early = list_schedule(self.problem, late.starts, self.reference, _PATIENCE)
            found = min((one for one in (late, early) if one is not None), key=lambda one: one.makespan)
            if found.makespan < best.makespan:
                best = compact_listing(self.problem, found.starts)
            if early is None or best.makespan <= bound or early.makespan >= listing.makespan:
                break
            listing = early
        return best

    def _truncate(self, listing: Listing, nmicros: int) -> Listing:
        return compact_listing(self.problem, [row[:nmicros] for row in listing.starts])


def compact_listing(problem: PlacementProblem, wished: Sequence[Sequence[Number]]) -> Listing:
    """Every block as early as the order of these (feasible) starts allows on each device."""
    starts = [[0] * len(row) for row in wished]
    free = [0] * problem.ndevs
    for _, mid, block in sorted((at, mid, block) for block, row in enumerate(wished) for mid, at in enumerate(row)):
        at = 0
        for dev in problem.devices[block]:
            at = max(at, free[dev])
        for prev, delay in problem.before[block]:
            at = max(at, starts[prev][mid] + problem.span[prev] + delay)
        starts[block][mid] = at
        for dev in problem.devices[block]:
            free[dev] = at + problem.span[block]
    return Listing(starts, max(free))


def within_memory(problem: PlacementProblem, starts: Starts) -> bool:
    """Whether no device ever holds more than its memory."""
    for dev, blocks in enumerate(problem.on_device):
        rows = [[(at, problem.memory[block]) for at in starts[block]] for block in blocks if problem.memory[block]]
        held: float = 0
        for _, amount in heapq.merge(*(sorted(row) for row in rows)):
            held += amount
            if not fits(held, problem.caps[dev]):
                return False
    return True


def _rules(problem: PlacementProblem, nmicros: int) -> list[Sequence[Sequence[float]]]:
    """Priorities known from hand-made schedules: finish first, weight gradients as fillers; and all forwards first."""
    size = problem.nblocks
    fills = [not problem.after[block] and bool(problem.before[block]) for block in range(size)]
    far = 1 + max(problem.tail) + sum(problem.span)
    late = far * (nmicros + 1)
    finish_first = [
        [problem.tail[b] + fills[b] * late + mid / (nmicros + 1) for mid in range(nmicros)] for b in range(size)
    ]
    oldest_first = [[mid * far - problem.tail[b] + fills[b] * late for mid in range(nmicros)] for b in range(size)]
    return [finish_first, oldest_first]


def _mirror(problem: PlacementProblem, listing: Listing) -> Listing:
    """The same schedule seen backwards: time from the end, and the last micro-batch first."""
    starts = [
        [listing.makespan - at - problem.span[block] for at in reversed(row)]
        for block, row in enumerate(listing.starts)
    ]
    return Listing(starts, listing.makespan)


def _reverse_time(problem: PlacementProblem) -> PlacementProblem:
    return PlacementProblem(
        problem.ndevs,
        problem.span,
        tuple(-amount for amount in problem.memory),
        problem.devices,
        problem.after,
        problem.caps,
        problem.unit,
    )
