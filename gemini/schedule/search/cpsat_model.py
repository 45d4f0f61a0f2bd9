"""Modulo scheduling as a constraint model for OR-tools' CP-SAT.

Block i starts at o_i + length × k_i. Dependencies bind starts; on a device every pair of blocks has an order on the
circle; when block j allocates memory, its device holds Σ m_i (−k_i + [o_i ≤ o_j]). Exact and quick on small
placements, also irregular ones; the beam takes over where it stalls. The limit is in the solver's own deterministic
time, so that results do not depend on the machine's speed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gemini.cpsat_library import import_cpsat
from gemini.schedule.placement_problem import PlacementProblem
from gemini.schedule.search.kernel import Kernel, keeps_rules

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_INSTALLED = "OR-tools is not installed"
_FINEST = 4096  # ticks per kernel in the model: finer grids only slow the solver down
_MEMORY_STEPS = 10_000


def solve_kernel(problem: PlacementProblem, length: int, effort: float, seconds: float, seed: int) -> Kernel | None:
    """A kernel of `length` within `effort` units of deterministic time and `seconds` of wall-clock time."""
    try:
        cp_model = import_cpsat()
    except ImportError:
        return None
    coarse = _coarsen(problem, length)
    if coarse is None:
        return None
    grain, spans, delays = coarse
    ticks = length // grain
    model = _Model(cp_model, problem, ticks, spans, delays, turns=3 * (problem.critical_path // length + 2))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would end the search without notifying the process
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    status = solver.solve(model.model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        starts = [solver.value(o) + ticks * solver.value(k) for o, k in zip(model.offset, model.turn)]
        kernel = Kernel(length, tuple(_refine(start, ticks, length, grain) for start in starts), problem.copies)
        return kernel if keeps_rules(problem, kernel) else None
    return None


def _refine(start: int, ticks: int, length: int, grain: int) -> int:
    turn, offset = divmod(start, ticks)
    return turn * length + offset * grain


def _coarsen(problem: PlacementProblem, length: int) -> tuple[int, list[int], list[list[int]]] | None:
    """Spans and delays on a grid that the solver can handle, rounded up; None if they do not fit."""
    grain = max(1, length // _FINEST)
    spans = [-(-span // grain) for span in problem.span]
    delays = [[-(-(problem.span[prev] + delay) // grain) for prev, delay in prevs] for prevs in problem.before]
    ticks = length // grain
    loads = [sum(spans[block] for block in blocks) for blocks in problem.on_device]
    return (grain, spans, delays) if max(loads) <= ticks else None


class _Model:
    """The variables and constraints for one kernel length."""

    def __init__(
        self,
        cp_model: Any,
        problem: PlacementProblem,
        ticks: int,
        spans: list[int],
        waits: list[list[int]],
        *,
        turns: int,
    ) -> None:
        self.model = cp_model.CpModel()
        self.problem, self.ticks, self.spans = problem, ticks, spans
        count = problem.nblocks
        self.offset = [self.model.new_int_var(0, ticks - 1, "") for _ in range(count)]
        self.turn = [self.model.new_int_var(0, turns, "") for _ in range(count)]
        self.order: dict[tuple[int, int], Any] = {}
        for block, prevs in enumerate(problem.before):
            for (prev, _), wait in zip(prevs, waits[block]):
                self.model.add(self._start(block) >= self._start(prev) + wait)
        for dev, blocks in enumerate(problem.on_device):
            self._share(blocks)
            if math.isfinite(problem.caps[dev]):
                self._limit(dev, [block for block in blocks if problem.memory[block]])

    def _start(self, block: int) -> Any:
        return self.offset[block] + self.ticks * self.turn[block]

    def _share(self, blocks: Sequence[int]) -> None:
        for place, first in enumerate(blocks):
            for second in blocks[place + 1 :]:
                if (first, second) in self.order:
                    continue
                before = self.model.new_bool_var("")
                self.order[first, second] = before
                self.order[second, first] = before.negated()
                self._follows(first, second, before)
                self._follows(second, first, before.negated())

    def _follows(self, first: int, second: int, when: Any) -> None:
        offset, spans = self.offset, self.spans
        self.model.add(offset[first] + spans[first] <= offset[second]).only_enforce_if(when)
        self.model.add(offset[second] + spans[second] <= offset[first] + self.ticks).only_enforce_if(when)

    def _limit(self, dev: int, blocks: list[int]) -> None:
        memory, scale = self.problem.memory, 1
        if not all(float(memory[block]).is_integer() for block in blocks):
            scale = _MEMORY_STEPS
        # Allocations are rounded up and releases down, so every solution is within the real limit.
        amounts = {block: math.ceil(memory[block] * scale - 1e-6) for block in blocks}
        surplus = sum(amounts.values())
        cap = math.floor(self.problem.caps[dev] * scale + 1e-6)
        if surplus > 0:  # rounding must not appear as a leak: the final check covers this device
            return
        for taking in blocks:
            if amounts[taking] > 0:
                held = [
                    amounts[block] * ((1 if block == taking else self.order[block, taking]) - self.turn[block])
                    for block in blocks
                ]
                self.model.add(sum(held) + surplus * self.turn[taking] <= cap)
