"""The steady state: the shortest period found, trying periods from the lower bound upwards.

    lower bound ── beam, narrow ──► first period that works
                └─ beam, wide, and the solver ──► shorter ones, as far as the effort reaches

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

from gemini.schedule.bounds import period_bound
from gemini.schedule.problem import Problem
from gemini.schedule.search.beam import Effort, beam_search
from gemini.schedule.search.insideout import Placing, placings
from gemini.schedule.search.kernel import Kernel, keeps_rules
from gemini.schedule.search.reserve import reservations
from gemini.schedule.search.solver import NOT_INSTALLED, solve_kernel, solver_installed

_STRETCHES = (0, 10, 25, 50, 100, 200, 300, 500, 750, 1000, 1250, 1500, 2000, 2500, 3000, 4000, 5000)  # 1/10,000
_EVERY_LENGTH_UP_TO = 40
_QUICK = Effort(4, 4)
_THOROUGH = (Effort(16, 4), Effort(64, 6))
_QUICK_RESERVATIONS = 6
_LARGEST_FOR_SOLVER = 80
_SOLVER_EFFORT = 0.5
_MOST_PERIODS = 120
_LARGEST_FOR_ALTERNATIVES = 256


@dataclass
class Steady:
    """The best kernel so far, how it was found, and what was learnt on the way."""

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

    def __init__(self, problem: Problem, fallback: Kernel, *, max_kernel: int, seed: int, deadline: float) -> None:
        self.problem = problem
        self.seed = seed
        self.deadline = deadline
        self.max_kernel = max_kernel
        self.best = Steady(fallback, "one micro-batch at a time", period_bound(problem))
        self._kernels: dict[int, tuple[Problem, list[Placing]]] = {}

    def run(self) -> Steady:
        """At the bound first; then quick attempts until one works; then thorough ones below it."""
        bound = self.best.bound
        self._attempt(_QUICK, None, self._at_bound())
        if not self._finished():
            self._ask_solver([(bound, 1)] if bound.denominator == 1 else [])
        if not self._finished():
            self._attempt(_QUICK, _QUICK_RESERVATIONS, self._periods())
        if not self._finished():
            self._ask_solver([(period, copies) for period, copies in self._periods() if copies == 1])
        for effort in _THOROUGH:
            if not self._finished():
                self._attempt(effort, None, self._periods())
        if not self.best.optimal:
            if time.perf_counter() > self.deadline:
                self.best.notes.append("stopped at the time limit")
            if not solver_installed():
                self.best.notes.append(NOT_INSTALLED)
        return self.best

    def at_length(self, length: int, copies: int, effort: Effort, variants: int | None = None) -> Kernel | None:
        """A kernel of this length by beam search, or None."""
        problem, orders = self._kernel_problem(copies)
        for reserved in islice(reservations(problem, length, self.seed), variants):
            for placing in orders:
                kernel = beam_search(problem, length, placing, reserved, effort, deadline=self.deadline)
                if kernel is not None and keeps_rules(problem, kernel):
                    return kernel
        return None

    def under(self, problem: Problem) -> SteadySearch:
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
                kernel = beam_search(problem, best.length, placing, reserved, _QUICK, deadline=self.deadline)
                if kernel is not None and keeps_rules(problem, kernel):
                    yield kernel

    def _kernel_problem(self, copies: int) -> tuple[Problem, list[Placing]]:
        if copies not in self._kernels:
            problem = self.problem.times(copies)
            self._kernels[copies] = (problem, placings(problem))
        return self._kernels[copies]

    def _finished(self) -> bool:
        return self.best.optimal or time.perf_counter() > self.deadline

    def _attempt(self, effort: Effort, variants: int | None, periods: Iterable[tuple[Fraction, int]]) -> None:
        for period, copies in periods:
            if self._finished() or period >= self.best.kernel.period:
                return
            kernel = self.at_length(int(period * copies), copies, effort, variants)
            if kernel is not None:
                self.best.kernel, self.best.method = kernel, "beam search"
                return

    def _at_bound(self) -> list[tuple[Fraction, int]]:
        """The bound itself, in kernels that it divides."""
        bound = self.best.bound
        return [(bound, copies) for copies in range(1, self.max_kernel + 1) if (bound * copies).denominator == 1]

    def _periods(self) -> list[tuple[Fraction, int]]:
        """(period, micro-batches a kernel) from the bound to what is known to work, shortest first."""
        bound, worst = self.best.bound, self.best.kernel.period
        found: dict[Fraction, int] = {}
        for copies in range(self.max_kernel, 0, -1):
            least = math.ceil(bound * copies)
            lengths: Iterable[int]
            if least <= _EVERY_LENGTH_UP_TO:
                lengths = range(least, math.ceil(bound * copies * Fraction(3, 2)) + 1)
            else:
                lengths = [math.ceil(bound * copies * (1 + Fraction(stretch, 10_000))) for stretch in _STRETCHES]
            found.update((Fraction(length, copies), copies) for length in lengths)
        longer = math.ceil(bound * Fraction(3, 2))
        while longer < worst and len(found) < _MOST_PERIODS:
            found[Fraction(longer)] = 1
            longer = math.ceil(longer * Fraction(21, 20)) if longer >= 20 else longer + 1
        return sorted((period, copies) for period, copies in found.items() if period < worst)

    def _ask_solver(self, periods: list[tuple[Fraction, int]]) -> None:
        for period, copies in periods:
            problem = self.problem.times(copies)
            if period >= self.best.kernel.period or self._finished() or problem.nblocks > _LARGEST_FOR_SOLVER:
                return
            left = self.deadline - time.perf_counter()
            verdict = solve_kernel(problem, int(period * copies), _SOLVER_EFFORT, left, self.seed)
            if verdict.kernel is not None:
                self.best.kernel, self.best.method = verdict.kernel, "CP-SAT"
                return
