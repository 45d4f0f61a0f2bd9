"""Score: rank candidate solutions.

By memory beyond the limits, then idle workers, then the time of the most loaded worker, then the cut, then the number
of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from gemini.errors import PartitionError
from gemini.partition.local_search.memory_excess import memory_overflow
from gemini.partition.local_search.merge_stages import CUT_PER_STAGE
from gemini.partition.local_search.search_state import SearchState
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment


@dataclass(frozen=True)
class Candidate:
    """Stages in topological order, their workers, and their score."""

    stage_of: tuple[int, ...]
    worker_of: tuple[int, ...]
    idle: int  # workers without an item
    overflow_mb: float
    time_ms: float
    cut: float
    nstages: int
    origin: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[float, int, float, float, int]:
        """The sort key; smaller is better."""
        return (round(self.overflow_mb, 6), self.idle, _round(self.time_ms), _round(self.cut), self.nstages)

    @property
    def part_of(self) -> list[int]:
        """The worker of each item."""
        return [self.worker_of[stage] for stage in self.stage_of]


def _round(value: float) -> float:
    """Round away differences from the order of additions."""
    return float(f"{value:.9g}")


def evaluate(problem: Problem, stage_of: Sequence[int], worker_of: Sequence[int], origin: str = "") -> Candidate:
    """Score stages in topological order; some may be empty."""
    state = SearchState(problem, stage_of, worker_of)
    beyond = sum(memory_overflow(problem, stage_of, worker_of))
    return Candidate(
        tuple(stage_of),
        tuple(worker_of),
        state.members.count(0),
        beyond,
        state.bottleneck,
        state.cut,
        len(set(stage_of)),
        origin,
    )


def evaluate_state(state: SearchState, origin: str = "") -> Candidate:
    """Score a search state."""
    return evaluate(state.problem, state.block_of, state.worker_of, origin)


def select_within_slack(candidates: Iterable[Candidate], slack: float, ceiling: float = inf) -> Candidate:
    """Select the candidate with the smallest cut and few stages among those near the fastest and within `ceiling`."""
    found = list(candidates)
    best = min(found, key=lambda candidate: candidate.key)
    limit = max(best.time_ms, min(best.time_ms * (1 + slack), ceiling)) * (1 + 1e-12)
    close = [candidate for candidate in found if candidate.key[:2] == best.key[:2] and candidate.time_ms <= limit]
    return min(
        close, key=lambda candidate: (_round(candidate.cut * (1 + CUT_PER_STAGE * candidate.nstages)), candidate.key)
    )


def to_assignment(problem: Problem, candidate: Candidate, **facts: Any) -> Assignment:
    """Return the assignment of a candidate; raises PartitionError where it exceeds the memory limits."""
    if candidate.overflow_mb > 1e-6:
        raise PartitionError(_memory_shortage_text(problem, candidate))
    score: dict[str, Any] = {
        "bottleneck": problem.bottleneck(candidate.part_of),
        "cut_mb": problem.cut_mb(candidate.part_of),
    }
    if candidate.origin:
        score["origin"] = candidate.origin
    return Assignment(candidate.stage_of, candidate.worker_of, {**score, **facts})


def _memory_shortage_text(problem: Problem, candidate: Candidate) -> str:
    beyond = memory_overflow(problem, candidate.stage_of, candidate.worker_of)
    lines = [
        f"  - worker {at} has {problem.workers[at].memory_mb:.1f} MB and lacks {mb:.1f} MB"
        for at, mb in enumerate(beyond)
        if mb > 0
    ]
    advice = [f"more than {problem.nparts} parts", "more micro-batches", "another partitioner"]
    if not problem.options.recompute:
        advice.insert(1, "recompute=True")
    return (
        "the memory of the workers is too small; the closest result:\n"
        + "\n".join(lines)
        + f"\n    → {', or '.join(advice)}"
    )
