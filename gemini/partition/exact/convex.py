"""Any stages in which values flow forward, not only stretches of a line: CP-SAT.

For every item i and stage s the model asks whether i is in a stage up to s. Along an edge these answers are ordered,
which is all that an acyclic quotient needs:

    up_to[i][s] ≤ up_to[i][s+1]          an item has one stage
    up_to[v][s] ≤ up_to[u][s]            u → v: u is not in a later stage than v

Time and memory of stages are sums over these; what is shared (a parameter, a value that arrives) is a variable that is
at least the answer of each of its users. Small problems are solved as they are. In large ones only items near the cuts
of a good contiguous answer are free to change to the neighbouring stage, the rest keeps its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemini.partition.exact.cpsat import Solution, cp_model, solve
from gemini.partition.exact.device_order import Seats
from gemini.partition.partition_problem import MB, Problem

UNITS = 10**6  # that a time limit is counted in
_SIZE_UNITS = 10**3  # that a MB is counted in
_SMALL = 600  # free items × stages that are solved as they are


@dataclass(frozen=True)
class Convex:
    """The stage of each item, the least bottleneck found, and whether there is proof that it is."""

    stage_of: tuple[int, ...]
    ms: float
    proven: bool


def is_small(problem: Problem) -> bool:
    """Whether a problem is solved as it is."""
    return len(problem.items) * problem.nparts <= _SMALL


def domains(problem: Problem, order: Sequence[int], cuts: Sequence[int], near: int) -> list[tuple[int, int]]:
    """The first and last stage that each item may be in: all, or the neighbour of a cut that is near."""
    if is_small(problem):
        return [(0, problem.nparts - 1)] * len(problem.items)
    found = [(0, 0)] * len(problem.items)
    for stage in range(len(cuts) - 1):
        first, last = cuts[stage], cuts[stage + 1]
        reach = min(near, (last - first) // 2)
        for at in range(first, last):
            low = stage - (1 if stage and at < first + reach else 0)
            high = stage + (1 if stage < len(cuts) - 2 and at >= last - reach else 0)
            found[order[at]] = (low, high)
    return found


class ConvexModel:
    """The model of one problem with its workers in one order."""

    def __init__(self, problem: Problem, seats: Seats, allowed: Sequence[tuple[int, int]], unit_ms: float) -> None:
        self.problem, self.seats, self.allowed, self.unit_ms = problem, seats, allowed, unit_ms
        self.stages = range(len(seats))
        self.model: Any = cp_model().CpModel()
        self.up_to = [self._answers(item) for item in range(len(problem.items))]
        self.inside = [[self._inside(item, stage) for stage in self.stages] for item in range(len(problem.items))]
        for edge in problem.edges:
            for stage in self.stages:
                self._at_most(self.up_to[edge.target][stage], self.up_to[edge.source][stage])
        for stage in self.stages:
            self.model.add(sum(self.inside[item][stage] for item in range(len(problem.items))) >= 1)
        self._arrivals()
        self._memory()

    # ── where items are ────────────────────────────────────────────────────────────────────────────────────────
    def _answers(self, item: int) -> list[Any]:
        low, high = self.allowed[item]
        pin = self.problem.items[item].pin
        if pin is not None:
            low = high = next(stage for stage, seat in enumerate(self.seats) if seat.worker == pin)
        free = {stage: self.model.new_bool_var(f"{item}<={stage}") for stage in range(low, high)}
        answers = [free.get(stage, int(stage >= high)) for stage in self.stages]
        for stage in range(low, high - 1):
            self.model.add_implication(answers[stage], answers[stage + 1])
        return answers

    def _inside(self, item: int, stage: int) -> Any:
        return self.up_to[item][stage] - (self.up_to[item][stage - 1] if stage else 0)

    def _at_most(self, one: Any, other: Any) -> None:
        if isinstance(one, int) and isinstance(other, int):
            if one > other:
                self.model.add_bool_or([])  # pins or places that contradict an edge
        else:
            self.model.add(one <= other)

    # ── what it costs ──────────────────────────────────────────────────────────────────────────────────────────
    def _any(self, answers: Iterable[Any], name: str) -> Any:
        """A variable that is 1 where any of some answers is."""
        found = self.model.new_bool_var(name)
        for answer in answers:
            self.model.add(found >= answer)
        return found

    def _arrivals(self) -> None:
        """Per stage the values that arrive there, with their size in bytes and their time."""
        problem = self.problem
        self.arriving: list[list[tuple[Any, int, int]]] = [[] for _ in self.stages]
        for value, (producer, readers) in enumerate(problem.readers):
            size = round(problem.values[value].mb * MB)
            first = min(self.allowed[producer][0], *(self.allowed[reader][0] for reader in readers))
            last = max(self.allowed[reader][1] for reader in readers)
            for stage in range(first, last + 1):
                # A reader here whose producer is in an earlier stage.
                before = self.up_to[producer][stage - 1] if stage else 0
                if isinstance(before, int) and not before:
                    continue
                needed = [self.inside[reader][stage] + before - 1 for reader in readers]
                ms = min(
                    (problem.transfer_ms(value, s.worker, self.seats[stage].worker) for s in self.seats[:stage]),
                    default=0.0,
                )
                self.arriving[stage].append((self._any(needed, f"v{value}@{stage}"), size, self._time(ms)))

    def _time(self, ms: float) -> int:
        return round(ms / self.unit_ms * UNITS)

    def times(self) -> list[Any]:
        """The time of each stage, in units of work."""
        items = self.problem.items
        return [
            sum(self._time(item.ms / self.seats[stage].speed) * self.inside[at][stage] for at, item in enumerate(items))
            + sum(ms * there for there, _, ms in self.arriving[stage])
            for stage in self.stages
        ]

    def nbytes(self) -> Any:
        """What crosses."""
        return sum(size * there for stage in self.stages for there, size, _ in self.arriving[stage])

    def _memory(self) -> None:
        problem = self.problem
        users: dict[str | int, list[int]] = {}  # of parameters by name, of values kept for backward by index
        for at, item in enumerate(problem.items):
            own: list[str | int] = [*item.parameters, *item.saved_values]
            for shared in own:
                users.setdefault(shared, []).append(at)
        for stage, seat in enumerate(self.seats):
            if seat.memory_mb is None:
                continue
            batches = problem.options.micro_batches
            share = min(seat.in_flight, batches) / batches
            used: list[Any] = []
            for shared, items in users.items():
                mb = problem.held_mb(shared) if isinstance(shared, str) else problem.saved_mb[shared] * share
                there = self._any((self.inside[item][stage] for item in items), f"{shared}@{stage}")
                used.append(_size(mb) * there)
            used += [_size(i.saved_own_mb * share) * self.inside[at][stage] for at, i in enumerate(problem.items)]
            most = _size(max(item.peak_mb for item in problem.items) / batches)
            peak = self.model.new_int_var(0, most, f"peak@{stage}")
            for at, item in enumerate(problem.items):
                self.model.add(peak >= _size(item.peak_mb / batches) * self.inside[at][stage])
            self.model.add(sum(used) + peak <= int(seat.memory_mb * _SIZE_UNITS + 1e-6))

    # ── solving ────────────────────────────────────────────────────────────────────────────────────────────────
    def hint(self, stage_of: Sequence[int]) -> None:
        """Start from this."""
        self.model.clear_hints()
        for item, answers in enumerate(self.up_to):
            for stage, answer in enumerate(answers):
                if not isinstance(answer, int):
                    self.model.add_hint(answer, int(stage_of[item] <= stage))

    def read(self, found: Solution) -> tuple[int, ...]:
        """The stage of each item."""
        return tuple(
            next(s for s in self.stages if (answers[s] if isinstance(answers[s], int) else found.value(answers[s])))
            for answers in self.up_to
        )


def _size(mb: float) -> int:
    """Rounded up, so that what fits in units fits."""
    return math.ceil(mb * _SIZE_UNITS - 1e-6)


def find_convex(
    problem: Problem, seats: Seats, allowed: Sequence[tuple[int, int]], limit: float, effort: float
) -> Convex | None:
    """Stages faster than a limit, the fastest there are, then those within the slack with the fewest bytes.

    None where there are none, or none were found with the effort.
    """
    model = ConvexModel(problem, seats, allowed, limit)
    slowest = model.model.new_int_var(0, UNITS, "slowest")
    for time in model.times():
        model.model.add(time <= slowest)
    model.model.minimize(slowest)
    found = solve(model.model, effort)
    if found is None:
        return None
    best, proven = found.value(slowest), found.proven
    stage_of = model.read(found)
    model.model.add(slowest <= min(UNITS, int(best * (1 + problem.options.slack))))
    model.hint(stage_of)
    model.model.minimize(model.nbytes())
    found = solve(model.model, effort)
    narrow = model.read(found) if found is not None else stage_of
    return Convex(narrow, best / UNITS * limit, proven and is_small(problem))
