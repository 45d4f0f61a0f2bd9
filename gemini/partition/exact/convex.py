"""Convex stages: CP-SAT over all acyclic assignments of items to stages, not only contiguous segments.

For every item i and stage s, a boolean variable states whether i is in a stage up to s. Ordering these variables along
every edge makes the graph of stages acyclic:

    up_to[i][s] ≤ up_to[i][s+1]          an item has one stage
    up_to[v][s] ≤ up_to[u][s]            u → v: u is not in a later stage than v

Time and memory of stages are sums over these variables; a shared amount (a parameter, a received value) has a variable
that is at least that of each of its users. Small problems are solved completely. In large ones only items near the cuts
of a good contiguous solution may move to the adjacent stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemini.cpsat_library import import_cpsat
from gemini.partition.exact.cpsat import Solution, solve
from gemini.partition.exact.device_order import StageSlots
from gemini.partition.partition_problem import MB, Problem

UNITS = 10**6  # per time limit
_SIZE_UNITS = 10**3  # per MB
_SMALL = 600  # items × stages that are solved completely


@dataclass(frozen=True)
class ConvexStages:
    """The stage of each item, the least bottleneck found, and whether it is proven optimal."""

    stage_of: tuple[int, ...]
    ms: float
    proven: bool


def is_small(problem: Problem) -> bool:
    """Return whether a problem is solved completely."""
    return len(problem.items) * problem.nparts <= _SMALL


def stage_domains(problem: Problem, order: Sequence[int], cuts: Sequence[int], near: int) -> list[tuple[int, int]]:
    """Return the first and last admissible stage of each item: all, or those adjacent to a nearby cut."""
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
    """The CP-SAT model of one problem with its workers in one order."""

    def __init__(self, problem: Problem, slots: StageSlots, allowed: Sequence[tuple[int, int]], unit_ms: float) -> None:
        self.problem, self.slots, self.allowed, self.unit_ms = problem, slots, allowed, unit_ms
        self.stages = range(len(slots))
        self.model: Any = import_cpsat().CpModel()
        self.up_to = [self._stage_variables(item) for item in range(len(problem.items))]
        self.inside = [[self._inside(item, stage) for stage in self.stages] for item in range(len(problem.items))]
        for edge in problem.edges:
            for stage in self.stages:
                self._at_most(self.up_to[edge.target][stage], self.up_to[edge.source][stage])
        for stage in self.stages:
            self.model.add(sum(self.inside[item][stage] for item in range(len(problem.items))) >= 1)
        self._add_received_values()
        self._add_memory_limits()

    # ── stages of items ──────────────────────────────────────────────────────────────────────────────────────────────
    def _stage_variables(self, item: int) -> list[Any]:
        low, high = self.allowed[item]
        pin = self.problem.items[item].pin
        if pin is not None:
            low = high = next(stage for stage, slot in enumerate(self.slots) if slot.worker == pin)
        free = {stage: self.model.new_bool_var(f"{item}<={stage}") for stage in range(low, high)}
        variables = [free.get(stage, int(stage >= high)) for stage in self.stages]
        for stage in range(low, high - 1):
            self.model.add_implication(variables[stage], variables[stage + 1])
        return variables

    def _inside(self, item: int, stage: int) -> Any:
        return self.up_to[item][stage] - (self.up_to[item][stage - 1] if stage else 0)

    def _at_most(self, one: Any, other: Any) -> None:
        if isinstance(one, int) and isinstance(other, int):
            if one > other:
                self.model.add_bool_or([])  # pins or domains that contradict an edge
        else:
            self.model.add(one <= other)

    # ── costs ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _add_any(self, variables: Iterable[Any], name: str) -> Any:
        """Add a variable that is 1 if any of the given ones is."""
        found = self.model.new_bool_var(name)
        for variable in variables:
            self.model.add(found >= variable)
        return found

    def _add_received_values(self) -> None:
        """Collect, per stage, the values it receives with their bytes and transfer time."""
        problem = self.problem
        self.received: list[list[tuple[Any, int, int]]] = [[] for _ in self.stages]
        for value, (producer, readers) in enumerate(problem.readers):
            size = round(problem.values[value].mb * MB)
            first = min(self.allowed[producer][0], *(self.allowed[reader][0] for reader in readers))
            last = max(self.allowed[reader][1] for reader in readers)
            for stage in range(first, last + 1):
                # A reader in this stage whose producer is in an earlier stage.
                before = self.up_to[producer][stage - 1] if stage else 0
                if isinstance(before, int) and not before:
                    continue
                needed = [self.inside[reader][stage] + before - 1 for reader in readers]
                ms = min(
                    (problem.transfer_ms(value, s.worker, self.slots[stage].worker) for s in self.slots[:stage]),
                    default=0.0,
                )
                self.received[stage].append((self._add_any(needed, f"v{value}@{stage}"), size, self._time(ms)))

    def _time(self, ms: float) -> int:
        return round(ms / self.unit_ms * UNITS)

    def times(self) -> list[Any]:
        """Return the time of each stage, in units."""
        items = self.problem.items
        return [
            sum(self._time(item.ms / self.slots[stage].speed) * self.inside[at][stage] for at, item in enumerate(items))
            + sum(ms * present for present, _, ms in self.received[stage])
            for stage in self.stages
        ]

    def nbytes(self) -> Any:
        """Return the bytes transferred."""
        return sum(size * present for stage in self.stages for present, size, _ in self.received[stage])

    def _add_memory_limits(self) -> None:
        problem = self.problem
        users: dict[str | int, list[int]] = {}  # of parameters by name, of saved values by index
        for at, item in enumerate(problem.items):
            own: list[str | int] = [*item.parameters, *item.saved_values]
            for shared in own:
                users.setdefault(shared, []).append(at)
        for stage, slot in enumerate(self.slots):
            if slot.memory_mb is None:
                continue
            batches = problem.options.micro_batches
            share = min(slot.in_flight, batches) / batches
            used: list[Any] = []
            for shared, items in users.items():
                mb = problem.parameter_state_mb(shared) if isinstance(shared, str) else problem.saved_mb[shared] * share
                present = self._add_any((self.inside[item][stage] for item in items), f"{shared}@{stage}")
                used.append(_size(mb) * present)
            used += [_size(i.saved_own_mb * share) * self.inside[at][stage] for at, i in enumerate(problem.items)]
            most = _size(max(item.peak_mb for item in problem.items) / batches)
            peak = self.model.new_int_var(0, most, f"peak@{stage}")
            for at, item in enumerate(problem.items):
                self.model.add(peak >= _size(item.peak_mb / batches) * self.inside[at][stage])
            self.model.add(sum(used) + peak <= int(slot.memory_mb * _SIZE_UNITS + 1e-6))

    # ── solving ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def hint(self, stage_of: Sequence[int]) -> None:
        """Set the initial solution of the solver."""
        self.model.clear_hints()
        for item, variables in enumerate(self.up_to):
            for stage, variable in enumerate(variables):
                if not isinstance(variable, int):
                    self.model.add_hint(variable, int(stage_of[item] <= stage))

    def extract_stages(self, found: Solution) -> tuple[int, ...]:
        """Return the stage of each item in a solution."""
        return tuple(
            next(
                s for s in self.stages if (variables[s] if isinstance(variables[s], int) else found.value(variables[s]))
            )
            for variables in self.up_to
        )


def _size(mb: float) -> int:
    """Round up, so that stages which fit in units fit in MB."""
    return math.ceil(mb * _SIZE_UNITS - 1e-6)


def find_convex(
    problem: Problem, slots: StageSlots, allowed: Sequence[tuple[int, int]], limit: float, effort: float
) -> ConvexStages | None:
    """Find the fastest stages below a time limit, then those within the slack with the fewest bytes.

    Return None where there are none, or none were found with the effort.
    """
    model = ConvexModel(problem, slots, allowed, limit)
    slowest = model.model.new_int_var(0, UNITS, "slowest")
    for time in model.times():
        model.model.add(time <= slowest)
    model.model.minimize(slowest)
    found = solve(model.model, effort)
    if found is None:
        return None
    best, proven = found.value(slowest), found.proven
    stage_of = model.extract_stages(found)
    model.model.add(slowest <= min(UNITS, int(best * (1 + problem.options.slack))))
    model.hint(stage_of)
    model.model.minimize(model.nbytes())
    found = solve(model.model, effort)
    narrow = model.extract_stages(found) if found is not None else stage_of
    return ConvexStages(narrow, best / UNITS * limit, proven and is_small(problem))
