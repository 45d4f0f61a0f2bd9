"""Comparing partitioners: all of them on one problem, side by side, and equal layers as people cut by hand.

One that fails is a row with its reason.
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
from gemini.partition.entry import in_order, partition
from gemini.partition.partition_options import Options
from gemini.partition.problem_builder import build_problem
from gemini.partition.registry import find_partitioner, partitioners
from gemini.profiling.profile_result import Profile

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """What one partitioner made of the problem; without an analysis it failed, for `reason`."""

    name: str
    seconds: float
    partition: Partition | None = None
    analysis: Analysis | None = None
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """Partitioners side by side: those that succeeded by balance, then those that failed."""

    model: str
    nparts: int
    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        """The row of a partitioner."""
        return next(row for row in self.rows if row.name == name)

    @property
    def best(self) -> Row | None:
        """The row with the greatest predicted speed-up among those that fit their memory."""
        fitting = [row for row in self.rows if row.analysis is not None and row.analysis.fits]
        return max(fitting, key=lambda row: row.analysis.speedup if row.analysis else 0.0, default=None)

    def table(self) -> str:
        """A table, the best marked; coloured on a terminal."""
        from gemini.partition.analysis.analysis_table import comparison_text

        return comparison_text(self)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
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
    """Run several partitioners (default: all there are, and the baseline) on one problem."""
    options = options or Options()
    names = all_partitioners() if partitioners is None else list(partitioners)
    for name in partitioners or ():
        if name != BASELINE:
            find_partitioner(name)  # a wrong name is the caller's mistake, not a result
    rows = []
    for at, name in enumerate(names):
        if progress is not None:
            progress(at, len(names), name)
        rows.append(_row(graph, profile, nparts, name, options))
    rows.sort(key=lambda row: (row.analysis is None, row.analysis.balance if row.analysis else 0.0))
    return Comparison(graph.model_name, nparts, tuple(rows))


def all_partitioners() -> list[str]:
    """Every partitioner there is, and the baseline."""
    return [*partitioners(), BASELINE]


def partition_equal_layers(graph: Graph, profile: Profile, nparts: int, options: Options | None = None) -> Partition:
    """Cut a profiled graph by the baseline."""
    options = options or Options()
    problem = build_problem(graph, profile, nparts, options)
    found = assign_equal_layers(graph, problem)
    stages, workers = in_order(problem, found)
    return Partition(graph.model_name, BASELINE, nparts, stages, workers, options.to_json(), found.facts)


def _row(graph: Graph, profile: Profile, nparts: int, name: str, options: Options) -> Row:
    began = time.perf_counter()
    try:
        made = (
            partition_equal_layers(graph, profile, nparts, options)
            if name == BASELINE
            else partition(graph, profile, nparts, name, options)
        )
        seconds = time.perf_counter() - began
        return Row(name, seconds, made, analyse(graph, profile, made, options))
    except GeminiError as error:
        return Row(name, time.perf_counter() - began, reason=str(error))
    except Exception as error:  # a partitioner of somebody else's package must not keep the others' results away
        return Row(name, time.perf_counter() - began, reason=f"{type(error).__name__}: {error}")
