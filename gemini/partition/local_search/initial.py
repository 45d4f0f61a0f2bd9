"""Starts: first answers with one stage a worker, which refinement improves.

The best contiguous cuts of several orders are the usual ones. Where pins or memory leave none of those, a start that
keeps the pins and nothing else; refinement then looks for balance and for memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from gemini.errors import PartitionError
from gemini.partition.exact.contiguous import Cuts, fastest, narrowest
from gemini.partition.exact.device_order import Seats, seatings
from gemini.partition.exact.prefix_costs import Line
from gemini.partition.item_orders import orders, pinned_order, random_order, worker_order
from gemini.partition.local_search.score import Answer, judge
from gemini.partition.partition_problem import Problem

_SEATINGS = 24


def check_size(problem: Problem) -> None:
    """Raise PartitionError where there are fewer items than parts."""
    if problem.nparts > len(problem.items):
        raise PartitionError(
            f"{len(problem.items)} items cannot fill {problem.nparts} parts\n"
            f"    → ask for {len(problem.items)} parts or fewer"
        )


def starts(problem: Problem, rng: random.Random, drawn: int = 2) -> list[Answer]:
    """First answers, the best first; `drawn` random orders are among those that are cut."""
    check_size(problem)
    rows = dict(orders(problem))
    if any(item.pin is not None for item in problem.items):
        rows["pinned"] = tuple(pinned_order(problem))
    rows.update({f"random {at}": tuple(random_order(problem, rng)) for at in range(drawn)})
    found = list(contiguous_answers(problem, rows))
    if not found and problem.has_memory_limits:
        found = [
            judge(problem, answer.stage_of, answer.worker_of, answer.origin)
            for answer in contiguous_answers(_unlimited(problem), rows)
        ]
    if not found:
        found = list(_pinned(problem))
    return sorted(found, key=lambda answer: answer.key)


def _unlimited(problem: Problem) -> Problem:
    workers = tuple(replace(worker, memory_mb=None) for worker in problem.workers)
    return replace(problem, options=replace(problem.options, workers=workers))


def contiguous_answers(problem: Problem, rows: dict[str, tuple[int, ...]]) -> Iterator[Answer]:
    """The best contiguous cuts of each order: the tightest, and the narrowest within the slack."""
    tables = list(islice(seatings(problem), _SEATINGS))
    for name, order in rows.items():
        line = Line(problem, order)
        best: tuple[Seats, Cuts] | None = None
        for seats in tables:
            found = fastest(line, seats, best[1].ms if best else float("inf"))
            if found is not None and (best is None or found.ms < best[1].ms):
                best = seats, found
        if best is None:
            continue
        seats, tight = best
        yield _answer(problem, line, seats, tight, name)
        narrow = narrowest(line, seats, tight.ms * (1 + problem.options.slack))
        if narrow is not None and narrow.at != tight.at:
            yield _answer(problem, line, seats, narrow, name)


def _answer(problem: Problem, line: Line, seats: Seats, cuts: Cuts, name: str) -> Answer:
    stage_of = [0] * len(problem.items)
    for stage in range(len(seats)):
        for at in range(cuts.at[stage], cuts.at[stage + 1]):
            stage_of[line.order[at]] = stage
    return judge(problem, stage_of, [seat.worker for seat in seats], f"contiguous, {name} order")


def _pinned(problem: Problem) -> Iterator[Answer]:
    """Every item as early as edges and pins allow, free workers at the end, in the middle or in front."""
    pinned = worker_order(problem)
    free = [worker for worker in range(problem.nparts) if worker not in pinned]
    tables: list[Sequence[int]] = [[*pinned, *free], [*pinned[:-1], *free, *pinned[-1:]], [*free, *pinned]]
    for workers in tables:
        rank = {worker: at for at, worker in enumerate(workers)}
        stage_of: list[int] = []
        for at, item in enumerate(problem.items):
            if item.pin is not None:
                stage_of.append(rank[item.pin])
            else:
                stage_of.append(max((stage_of[before] for before in problem.predecessors[at]), default=0))
        yield judge(problem, stage_of, workers, "pins")
