"""Modulo scheduling by beam search: fill the circles of all devices block by block, from the inside out.

Each step places one block on its circles, as close to its placed neighbours as it goes, in a few alternative
positions; the best partial kernels survive. Two partial kernels with the same ends and the same room left have the
same future, so only the cheaper one survives: on nested placements (every micro-batch goes down the devices and comes
back up) the beam is then an exact dynamic programme over the devices, and stays fast on hundreds of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gemini.schedule.placement_problem import PlacementProblem, fits
from gemini.schedule.search.kernel import Kernel, steady_peak
from gemini.schedule.search.modulo_table import Occupied, Room, Wish, occupy, positions
from gemini.schedule.search.nested_order import Placing

_UNPLACED = None
_ROOT_POSITIONS = 8  # the first block of a flow has no neighbour to be close to


@dataclass(frozen=True)
class Effort:
    """How many partial kernels survive each step, and how many positions each block is tried in."""

    width: int
    positions: int


@dataclass
class Budget:
    """The budget of a search: steps (partial kernels extended), and wall-clock time as a safety net.

    Steps do not depend on the machine, so neither does the result.
    """

    steps: float = math.inf
    deadline: float = math.inf

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.steps <= 0 or time.perf_counter() > self.deadline


@dataclass
class _Partial:
    cost: float
    starts: list[int | None]
    circles: list[Occupied]


@dataclass(frozen=True)
class _Step:
    """State shared by all partial kernels at one step of the placing order."""

    block: int
    weight: float
    rests: list[tuple[int, ...]]
    check: list[int]
    ends: list[int]
    open_devices: list[int]
    is_root: bool


def beam_search(
    problem: PlacementProblem,
    length: int,
    placing: Placing,
    reserved: Mapping[int, int],
    effort: Effort,
    *,
    budget: Budget,
) -> Kernel | None:
    """A kernel of this length, or None. `reserved` fixes the offsets of blocks that span several devices."""
    beam = _Beam(problem, length, reserved, effort)
    partials = [beam.empty()]
    for step in _steps(problem, placing, reserved):
        if budget.spent:
            return None
        budget.steps -= len(partials)
        best: dict[object, _Partial] = {}
        for partial in partials:
            for extended in beam.extensions(partial, step):
                key = _future(extended, step, length)
                known = best.get(key)
                if known is None or extended.cost < known.cost:
                    best[key] = extended
        partials = sorted(best.values(), key=lambda partial: partial.cost)[: effort.width]
        if not partials:
            return None
    starts = partials[0].starts
    return Kernel(length, tuple(start or 0 for start in starts), problem.copies)


def _steps(problem: PlacementProblem, placing: Placing, reserved: Mapping[int, int]) -> list[_Step]:
    placed: set[int] = set()
    ends: set[int] = set()
    missing = [len(problem.before[b]) + len(problem.after[b]) for b in range(problem.nblocks)]
    left = [
        sorted((problem.span[b] for b in blocks if b not in reserved), reverse=True) for blocks in problem.on_device
    ]
    holders = [{b for b in blocks if problem.memory[b]} for blocks in problem.on_device]
    steps = []
    for block, weight in zip(placing.order, placing.weight):
        neighbours = [other for other, _ in (*problem.before[block], *problem.after[block])]
        is_root = not any(other in placed for other in neighbours)
        placed.add(block)
        for other in neighbours:
            missing[other] -= 1
            if not missing[other]:
                ends.discard(other)
        if any(other not in placed for other in neighbours):
            ends.add(block)
        rests: list[tuple[int, ...]] = []
        if block not in reserved:
            for dev in problem.devices[block]:
                left[dev].remove(problem.span[block])
                rests.append(tuple(left[dev]))
        check = [d for d in problem.devices[block] if _is_peak_known(problem, holders[d], placed)]
        open_devices = [dev for dev in range(problem.ndevs) if left[dev]]
        steps.append(_Step(block, weight, rests, check, sorted(ends), open_devices, is_root))
    return steps


def _is_peak_known(problem: PlacementProblem, holders: set[int], placed: set[int]) -> bool:
    """Whether a device's peak is determined: its blocks are placed, or are fillers that start after placed ones."""
    return bool(holders) and all(
        block in placed
        or (not problem.after[block] and problem.before[block] and all(p in placed for p, _ in problem.before[block]))
        for block in holders
    )


class _Beam:
    """How partial kernels of one length grow."""

    def __init__(self, problem: PlacementProblem, length: int, reserved: Mapping[int, int], effort: Effort) -> None:
        self.problem = problem
        self.length = length
        self.reserved = reserved
        self.effort = effort

    def empty(self) -> _Partial:
        """Nothing placed, but the reserved offsets taken."""
        circles: list[Occupied] = [()] * self.problem.ndevs
        for block, offset in self.reserved.items():
            for dev in self.problem.devices[block]:
                circles[dev] = occupy(circles[dev], offset, self.problem.span[block])
        return _Partial(0.0, [_UNPLACED] * self.problem.nblocks, circles)

    def extensions(self, partial: _Partial, step: _Step) -> list[_Partial]:
        """The partial kernel with the step's block in each of its positions that memory allows."""
        problem, block, length = self.problem, step.block, self.length
        span = problem.span[block]
        extended = []
        for distance, at in self._options(partial, step):
            starts = partial.starts.copy()
            starts[block] = at
            if all(self._within(starts, dev) for dev in step.check):
                circles = partial.circles
                if block not in self.reserved:
                    circles = circles.copy()
                    for dev in problem.devices[block]:
                        circles[dev] = occupy(circles[dev], at % length, span)
                extended.append(_Partial(partial.cost + distance * step.weight, starts, circles))
        return extended

    def _options(self, partial: _Partial, step: _Step) -> list[tuple[int, int]]:
        block = step.block
        wish = self._wish(partial.starts, block)
        if wish.low is not None and wish.high is not None and wish.low > wish.high:
            return []
        if block in self.reserved:
            only = wish.time(self.reserved[block], self.length)
            return [only] if only is not None else []
        rooms = [
            Room(partial.circles[dev], rest, self.length) for dev, rest in zip(self.problem.devices[block], step.rests)
        ]
        limit = self.effort.positions * (_ROOT_POSITIONS if step.is_root else 1)
        return positions(rooms, self.problem.span[block], wish, limit)

    def _wish(self, starts: list[int | None], block: int) -> Wish:
        problem = self.problem
        low: int | None = None
        for prev, delay in problem.before[block]:
            at = starts[prev]
            if at is not None:
                arrival = at + problem.span[prev] + delay
                low = arrival if low is None else max(low, arrival)
        high: int | None = None
        for later, delay in problem.after[block]:
            at = starts[later]
            if at is not None:
                latest = at - delay - problem.span[block]
                high = latest if high is None else min(high, latest)
        return Wish(low, high)

    def _within(self, starts: list[int | None], dev: int) -> bool:
        """Whether the device's peak fits, with fillers that are not placed yet as early as they could be."""
        problem = self.problem
        known: dict[int, int] = {}
        for block in problem.on_device[dev]:
            at = starts[block]
            if at is not None:
                known[block] = at
            elif problem.memory[block]:
                known[block] = max((starts[p] or 0) + problem.span[p] + delay for p, delay in problem.before[block])
        return fits(steady_peak(problem, self.length, known, dev), problem.caps[dev])


def _future(partial: _Partial, step: _Step, length: int) -> object:
    """The state of a partial kernel that affects later steps, without its cost."""
    ends = tuple((partial.starts[block] or 0) % length for block in step.ends)
    return ends, tuple(partial.circles[dev] for dev in step.open_devices)
