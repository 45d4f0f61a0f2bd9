"""The steady state: the shortest period found, trying periods from the lower bound upwards.

    lower bound ─► beam, narrow, upwards ─► first period that works
                                             │  solver and wider beams, downwards
                   shortest period found ◄───┘

A kernel may hold several micro-batches: with memory for three, a period of 16/3 needs a kernel of 16 with three in
it. Every attempt has a fixed effort, so that results do not depend on the machine; the deadline is a safety net.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice

from gemini.cpsat_library import has_cpsat
from gemini.schedule.bounds import period_bound
from gemini.schedule.placement_problem import PlacementProblem
from gemini.schedule.search.beam_search import Budget, Effort, beam_search
from gemini.schedule.search.compact import tightest
from gemini.schedule.search.cpsat_model import NOT_INSTALLED, solve_kernel
from gemini.schedule.search.kernel import Kernel, keeps_rules
from gemini.schedule.search.nested_order import Placing, placings
from gemini.schedule.search.reservations import reservations

_QUICK = Effort(4, 4)
_QUICK_RESERVATIONS = 6
_DOWNWARDS = ((_QUICK, 6, 300), (Effort(16, 4), 6, 64), (Effort(64, 6), 2, 64))  # effort, reservations, most blocks
_STEPS_UPWARDS = 40_000
_STEPS_AT_BOUND = 20_000
_STEPS_DOWNWARDS = 20_000
_FAILURES_IN_A_ROW = 2
_KERNELS_AT_BOUND = 3
_LARGEST_KERNEL = 1000
_LARGEST_TO_TIGHTEN = 150
_LARGEST_FOR_ALTERNATIVES = 256
_LARGEST_FOR_SOLVER = 80
_SOLVER_EFFORT = 0.5
_FINEST_STEP = 1000  # lengths are tried in steps of a thousandth of the bound near it,
_COARSEST_STEP = 20  # and of a twentieth far from it
_MOST_LENGTHS = 100


@dataclass
class Steady:
    """The best kernel so far, how it was found, and the search history."""

    kernel: Kernel
    method: str
    bound: Fraction
    notes: list[str] = field(default_factory=list)

    @property
    def optimal(self) -> bool:
        """Whether no shorter period is possible."""
        return self.kernel.period <= self.bound


class SteadySearch:
    """One search for a steady state; `run` returns the best kernel found."""

    def __init__(
        self, problem: PlacementProblem, fallback: Kernel, *, max_kernel: int, seed: int, deadline: float
    ) -> None:
        self.problem = problem
        self.seed = seed
        self.deadline = deadline
        self.max_kernel = max_kernel
        self.best = Steady(fallback, "one micro-batch at a time", period_bound(problem))
        self._kernels: dict[int, tuple[PlacementProblem, list[Placing]]] = {}

    def run(self) -> Steady:
        """At the bound first; then upwards until something works; then down from there, harder and harder."""
        at_bound, *others = [*self._at_bound(), None]
        if at_bound is not None and at_bound[1] == 1:
            self._ascend([at_bound], self._budget(math.inf), None)
        if not self.best.optimal:
            self._keep(self.best.kernel, self.best.method)
        self._ascend([(length, 1) for length in self._lengths(1)], self._budget(_STEPS_UPWARDS), _QUICK_RESERVATIONS)
        multiple = [kernel for kernel in (at_bound, *others) if kernel is not None and kernel[1] > 1]
        self._ascend(multiple, self._budget(_STEPS_AT_BOUND), None)
        self._ask_solver()
        for effort, variants, largest in _DOWNWARDS:
            self._descend(effort, variants, largest)
        if not self.best.optimal:
            if time.perf_counter() > self.deadline:
                self.best.notes.append("stopped at the time limit")
            if not has_cpsat():
                self.best.notes.append(NOT_INSTALLED)
        return self.best

    def at_length(
        self, length: int, copies: int, effort: Effort, variants: int | None, budget: Budget
    ) -> Kernel | None:
        """A kernel of this length by beam search, or None."""
        problem, orders = self._kernel_problem(copies)
        for reserved in islice(reservations(problem, length, self.seed), variants):
            for placing in orders:
                kernel = beam_search(problem, length, placing, reserved, effort, budget=budget)
                if kernel is not None and keeps_rules(problem, kernel):
                    return kernel
        return None

    def _budget(self, steps: float) -> Budget:
        return Budget(steps, self.deadline)

    def under(self, problem: PlacementProblem) -> SteadySearch:
        """The same search under other memory limits."""
        return SteadySearch(
            problem, self.best.kernel, max_kernel=self.max_kernel, seed=self.seed, deadline=self.deadline
        )

    def alternatives(self) -> Iterator[Kernel]:
        """Other kernels of the best period: their ramps may be shorter."""
        best = self.best.kernel
        if best.copies * self.problem.nblocks > _LARGEST_FOR_ALTERNATIVES:
            return
        problem, orders = self._kernel_problem(best.copies)
        for reserved in islice(reservations(problem, best.length, self.seed), _QUICK_RESERVATIONS):
            for placing in orders:
                kernel = beam_search(problem, best.length, placing, reserved, _QUICK, budget=self._budget(math.inf))
                if kernel is not None and keeps_rules(problem, kernel):
                    yield kernel

    def _kernel_problem(self, copies: int) -> tuple[PlacementProblem, list[Placing]]:
        if copies not in self._kernels:
            problem = self.problem.times(copies)
            self._kernels[copies] = (problem, placings(problem))
        return self._kernels[copies]

    def _ascend(self, kernels: Iterable[tuple[int, int]], budget: Budget, variants: int | None) -> None:
        """The first of these (length, micro-batches) that works."""
        for length, copies in kernels:
            if self.best.optimal or budget.spent:
                return
            kernel = self.at_length(length, copies, _QUICK, variants, budget)
            if kernel is not None:
                self._keep(kernel, "beam search")
                return

    def _descend(self, effort: Effort, variants: int, largest: int) -> None:
        """Shorter and shorter periods, for each number of micro-batches until several in a row do not work."""
        budget = self._budget(_STEPS_DOWNWARDS)
        for copies in range(1, self.max_kernel + 1):
            if copies > 1 and copies * self.problem.nblocks > largest:
                return
            failures = 0
            for length in reversed(self._lengths(copies)):
                if self.best.optimal or budget.spent or failures == _FAILURES_IN_A_ROW:
                    break
                if length < self.best.kernel.period * copies:
                    kernel = self.at_length(length, copies, effort, variants, budget)
                    failures = failures + 1 if kernel is None else 0
                    if kernel is not None:
                        self._keep(kernel, "beam search")

    def _keep(self, kernel: Kernel, method: str) -> None:
        if kernel.period > self.best.bound and len(kernel.starts) <= _LARGEST_TO_TIGHTEN:
            kernel = tightest(self.problem.times(kernel.copies), kernel, 2 * self.max_kernel)
        self.best.kernel = kernel
        self.best.method = method

    def _at_bound(self) -> list[tuple[int, int]]:
        """The bound itself, in kernels that it divides."""
        bound, size = self.best.bound, self.problem.nblocks
        fitting = [copies for copies in range(1, self.max_kernel + 1) if (bound * copies).denominator == 1]
        small = [copies for copies in fitting[:_KERNELS_AT_BOUND] if copies == 1 or copies * size <= _LARGEST_KERNEL]
        return [(int(bound * copies), copies) for copies in small]

    def _lengths(self, copies: int) -> list[int]:
        """Lengths from the bound to the shortest feasible one, in steps that grow with the distance from the bound."""
        least, known = self.best.bound * copies, self.best.kernel.period * copies
        length = math.ceil(least)
        found: list[int] = []
        while length < known and len(found) < _MOST_LENGTHS:
            found.append(length)
            finest = least / _FINEST_STEP
            length += max(1, math.ceil(min(finest + (length - least) / 2, least / _COARSEST_STEP)))
        return found

    def _ask_solver(self) -> None:
        """One micro-batch per kernel: the shortest length, then from above until one fails within the effort."""
        if self.problem.nblocks > _LARGEST_FOR_SOLVER:
            return
        lengths = self._lengths(1)
        for length in (*lengths[:1], *reversed(lengths)):
            left = self.deadline - time.perf_counter()
            if self.best.optimal or left <= 0:
                return
            if length < self.best.kernel.period:
                kernel = solve_kernel(self.problem, length, _SOLVER_EFFORT, left, self.seed)
                if kernel is not None:
                    self._keep(kernel, "CP-SAT")
                elif length > lengths[0]:
                    return
