"""CP-SAT solver of OR-tools, an optional dependency, run deterministically.

Effort is limited by the solver's deterministic time, not by the clock, and it runs on one thread: clock limits and
threads would make results vary between runs. The clock limit only guards against very slow machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemini.cpsat_library import import_cpsat

_PATIENCE = 5.0  # seconds per unit of effort, which takes about one second


@dataclass(frozen=True)
class Solution:
    """A solution, and whether it is proven optimal."""

    solver: Any
    proven: bool

    def value(self, variable: Any) -> int:
        """Return the value of a variable."""
        return int(self.solver.value(variable))


def solve(model: Any, effort: float, gap: float = 0.0) -> Solution | None:
    """Return the best solution found, if any; one unit of effort is about one second."""
    module = import_cpsat()
    solver = module.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # the solver would end its search and swallow the interrupt
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = effort * _PATIENCE + 1.0
    solver.parameters.relative_gap_limit = gap
    status = solver.solve(model)
    if status not in (module.OPTIMAL, module.FEASIBLE):
        return None
    return Solution(solver, status == module.OPTIMAL)
