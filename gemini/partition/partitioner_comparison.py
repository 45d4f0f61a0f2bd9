"""Comparison of all partitioners and the equal-layers baseline on one problem.

A partitioner that fails is listed with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gemini.errors import GeminiError
from gemini.ir.graph import Graph
from gemini.partition.analysis.analysis_builder import analyse
from gemini.partition.analysis.analysis_result import Analysis
from gemini.partition.assignment import Partition
from gemini.partition.baseline import NAME as BASELINE
from gemini.partition.baseline import assign_equal_layers
from gemini.partition.entry import order_stages, partition
from gemini.partition.partition_options import Options
from gemini.partition.problem_builder import build_problem
from gemini.partition.registry import find_partitioner, partitioners
from gemini.profiling.profile_result import Profile

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ComparisonRow:
    """The result of one partitioner; without an analysis it failed, for `reason`."""

    name: str
    seconds: float
    partition: Partition | None = None
    analysis: Analysis | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The results of all partitioners: successful ones by balance, then failed ones."""

    model: str
    nparts: int
    rows: tuple[ComparisonRow, ...]

    def __iter__(self) -> Iterator[ComparisonRow]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> ComparisonRow:
        """Return the row of a partitioner."""
        return next(row for row in self.rows if row.name == name)

    @property
    def best(self) -> ComparisonRow | None:
        """The row with the greatest predicted speed-up among those within the memory limits."""
        fitting = [row for row in self.rows if row.analysis is not None and row.analysis.fits]
        return max(fitting, key=lambda row: row.analysis.speedup if row.analysis else 0.0, default=None)

    def table(self) -> str:
        """Return a table with the best row marked; coloured on a terminal."""
        from gemini.partition.analysis.analysis_table import comparison_text

        return comparison_text(self)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "model": self.model,
            "nparts": self.nparts,
            "best": None if self.best is None else self.best.name,
            "rows": [
                {
                    "partitioner": row.name,
                    "seconds": row.seconds,
                    "reason": row.reason,
                    "analysis": None if row.analysis is None else row.analysis.to_json(),
                }
                for row in self.rows
            ],
        }


def compare(
    graph: Graph,
    profile: Profile,
    nparts: int,
    partitioners: Sequence[str] | None = None,
    options: Options | None = None,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Run several partitioners (default: all, and the baseline) on one problem."""
    options = options or Options()
    names = all_partitioners() if partitioners is None else list(partitioners)
    for name in partitioners or ():
        if name != BASELINE:
            find_partitioner(name)  # an unknown name is an error of the caller, not a result
    rows = []
    for at, name in enumerate(names):
        if progress is not None:
            progress(at, len(names), name)
        rows.append(_run_partitioner(graph, profile, nparts, name, options))
    rows.sort(key=lambda row: (row.analysis is None, row.analysis.balance if row.analysis else 0.0))
    return Comparison(graph.model_name, nparts, tuple(rows))


def all_partitioners() -> list[str]:
    """Return the names of all partitioners and the baseline."""
    return [*partitioners(), BASELINE]


def partition_equal_layers(graph: Graph, profile: Profile, nparts: int, options: Options | None = None) -> Partition:
    """Cut a profiled graph into equal numbers of layers."""
    options = options or Options()
    problem = build_problem(graph, profile, nparts, options)
    found = assign_equal_layers(graph, problem)
    stages, workers = order_stages(problem, found)
    return Partition(graph.model_name, BASELINE, nparts, stages, workers, options.to_json(), found.facts)


def _run_partitioner(graph: Graph, profile: Profile, nparts: int, name: str, options: Options) -> ComparisonRow:
    began = time.perf_counter()
    try:
        made = (
            partition_equal_layers(graph, profile, nparts, options)
            if name == BASELINE
            else partition(graph, profile, nparts, name, options)
        )
        seconds = time.perf_counter() - began
        return ComparisonRow(name, seconds, made, analyse(graph, profile, made, options))
    except GeminiError as error:
        return ComparisonRow(name, time.perf_counter() - began, reason=str(error))
    except Exception as error:  # a third-party partitioner must not prevent the results of the rest
        return ComparisonRow(name, time.perf_counter() - began, reason=f"{type(error).__name__}: {error}")
