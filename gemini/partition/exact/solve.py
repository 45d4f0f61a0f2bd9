"""The partitioner `exact`: the least bottleneck first, then the fewest bytes within the slack of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemini.errors import PartitionError
from gemini.partition.exact.contiguous import Cuts, fastest, lower_bound, narrowest
from gemini.partition.exact.filling import fill
from gemini.partition.exact.line import Line
from gemini.partition.exact.orders import orders
from gemini.partition.exact.seats import Seats, seatings
from gemini.partition.problem import Problem
from gemini.partition.registry import Assignment


@dataclass(frozen=True)
class Try:
    """One order of items, one order of workers."""

    name: str
    line: Line
    seats: Seats


def partition_exact(problem: Problem) -> Assignment:
    """The optimum over contiguous cuts of several orders."""
    lines = {name: Line(problem, order) for name, order in orders(problem).items()}
    tries = [
        Try(name, line, seats)
        for seats in seatings(problem)
        for name, line in lines.items()
        if fill(line, seats) is not None
    ]
    best = _least(tries)
    if best is None:
        raise PartitionError(
            f"no contiguous cuts into {problem.nparts} parts fit the memory of the workers and the pins\n"
            "    → allow more memory, ask for more parts, or try another partitioner"
        )
    limit = best * (1 + problem.options.slack)
    chosen, cuts = _fewest(tries, limit)
    return _assignment(problem, chosen, cuts, best)


def _least(tries: list[Try]) -> float | None:
    """The least bottleneck of all."""
    best = float("inf")
    for one in sorted(tries, key=lambda one: lower_bound(one.line, one.seats)):
        if lower_bound(one.line, one.seats) > best:
            break
        found = fastest(one.line, one.seats, best)
        if found is not None:
            best = min(best, found.ms)
    return best if best < float("inf") else None


def _fewest(tries: list[Try], limit: float) -> tuple[Try, Cuts]:
    """The try and its cuts with the fewest bytes within the limit; the first of equals."""
    chosen: tuple[Try, Cuts] | None = None
    for one in tries:
        found = narrowest(one.line, one.seats, limit)
        if found is not None and (chosen is None or found.nbytes < chosen[1].nbytes):
            chosen = one, found
    if chosen is None:
        raise AssertionError("the cuts with the least bottleneck are within the limit")
    return chosen


def _assignment(problem: Problem, chosen: Try, cuts: Cuts, best: float) -> Assignment:
    stage_of = [0] * len(problem.items)
    for stage in range(len(chosen.seats)):
        for at in range(cuts.at[stage], cuts.at[stage + 1]):
            stage_of[chosen.line.order[at]] = stage
    workers = tuple(seat.worker for seat in chosen.seats)
    part_of = [workers[stage] for stage in stage_of]
    facts: dict[str, Any] = {
        "method": "contiguous",
        "order": chosen.name,
        "optimal": True,
        "bound_ms": round(best, 6),
        "gap": round(max(problem.times(part_of)) / best - 1, 6) if best else 0.0,
        "cut_mb": round(problem.cut_mb(part_of), 6),
    }
    if workers != tuple(range(problem.nparts)):
        facts["workers"] = list(workers)
    return Assignment(tuple(stage_of), workers, facts)
