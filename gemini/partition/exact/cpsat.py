"""The solver: CP-SAT of OR-tools, where it is installed, with the same answer for the same question.

Its effort is limited by its own count of work, not by the clock, and it runs on one thread: both would make answers
differ from run to run. The clock only guards against a machine that is much slower than thought.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

_PATIENCE = 5.0  # seconds of clock for one unit of effort, which takes about one


def has_solver() -> bool:
    """Whether OR-tools is installed; it is not imported to find out."""
    return importlib.util.find_spec("ortools") is not None


def cp_model() -> Any:
    """The module, imported where it is first used."""
    return importlib.import_module("ortools.sat.python.cp_model")


@dataclass(frozen=True)
class Solution:
    """What was found, and whether it is proven to be the best."""

    solver: Any
    proven: bool

    def value(self, variable: Any) -> int:
        """The value of a variable."""
        return int(self.solver.value(variable))


def solve(model: Any, effort: float, gap: float = 0.0) -> Solution | None:
    """The best solution found, if any; effort is about seconds."""
    module = cp_model()
    solver = module.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would end the search, and the program would not hear of it
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = effort * _PATIENCE + 1.0
    solver.parameters.relative_gap_limit = gap
    status = solver.solve(model)
    if status not in (module.OPTIMAL, module.FEASIBLE):
        return None
    return Solution(solver, status == module.OPTIMAL)
