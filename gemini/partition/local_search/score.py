"""Judging: which of several answers is the best, and what is handed back.

Memory within limits comes first, then that every worker has work, then the time of the most loaded worker, then what
crosses between workers, then the number of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from gemini.errors import PartitionError
from gemini.partition.local_search.memory_excess import overflow
from gemini.partition.local_search.merge_stages import WORTH
from gemini.partition.local_search.search_state import State
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment


@dataclass(frozen=True)
class Answer:
    """Stages numbered in order, their workers, and how good they are."""

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
        """Smaller is better."""
        return (round(self.overflow_mb, 6), self.idle, _rounded(self.time_ms), _rounded(self.cut), self.nstages)

    @property
    def part_of(self) -> list[int]:
        """The worker of each item."""
        return [self.worker_of[stage] for stage in self.stage_of]


def _rounded(value: float) -> float:
    """Equal but for the order of additions."""
    return float(f"{value:.9g}")


def judge(problem: Problem, stage_of: Sequence[int], worker_of: Sequence[int], origin: str = "") -> Answer:
    """The answer of stages that are numbered in order; some may be empty."""
    state = State(problem, stage_of, worker_of)
    beyond = sum(overflow(problem, stage_of, worker_of))
    return Answer(
        tuple(stage_of),
        tuple(worker_of),
        state.members.count(0),
        beyond,
        state.bottleneck,
        state.cut,
        len(set(stage_of)),
        origin,
    )


def judge_state(state: State, origin: str = "") -> Answer:
    """The answer that a state is."""
    return judge(state.problem, state.block_of, state.worker_of, origin)


def within_slack(answers: Iterable[Answer], slack: float, ceiling: float = inf) -> Answer:
    """What moves least, in few stages, of the answers close to the fastest and within a ceiling that it keeps."""
    found = list(answers)
    best = min(found, key=lambda answer: answer.key)
    limit = max(best.time_ms, min(best.time_ms * (1 + slack), ceiling)) * (1 + 1e-12)
    close = [answer for answer in found if answer.key[:2] == best.key[:2] and answer.time_ms <= limit]
    return min(close, key=lambda answer: (_rounded(answer.cut * (1 + WORTH * answer.nstages)), answer.key))


def finish(problem: Problem, answer: Answer, **facts: Any) -> Assignment:
    """The assignment of an answer; raises PartitionError where memory is not enough."""
    if answer.overflow_mb > 1e-6:
        raise PartitionError(_too_much(problem, answer))
    told: dict[str, Any] = {"bottleneck": problem.bottleneck(answer.part_of), "cut_mb": problem.cut_mb(answer.part_of)}
    if answer.origin:
        told["origin"] = answer.origin
    return Assignment(answer.stage_of, answer.worker_of, {**told, **facts})


def _too_much(problem: Problem, answer: Answer) -> str:
    beyond = overflow(problem, answer.stage_of, answer.worker_of)
    lines = [
        f"  - worker {at} has {problem.workers[at].memory_mb:.1f} MB and needs {mb:.1f} MB more"
        for at, mb in enumerate(beyond)
        if mb > 0
    ]
    advice = [f"more than {problem.nparts} parts", "more micro-batches", "another partitioner"]
    if not problem.options.recompute:
        advice.insert(1, "recompute=True")
    return "memory is not enough; the closest found:\n" + "\n".join(lines) + f"\n    → {', or '.join(advice)}"
