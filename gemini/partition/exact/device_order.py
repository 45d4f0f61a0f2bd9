"""Seats: which worker takes which stretch, from the front of the model to its end.

Workers that are alike may swap seats without a difference, so only orders that differ count: by speed, memory, or
items pinned to them. All are tried where they are few; else the given order, and by speed, rising and falling.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gemini.partition.partition_problem import Problem, in_flight

_FEW = 120


@dataclass(frozen=True)
class Seat:
    """A worker's place in the row."""

    worker: int
    speed: float
    memory_mb: float | None
    in_flight: int


Seats = tuple[Seat, ...]


def seatings(problem: Problem) -> list[Seats]:
    """The orders of workers to try, the given one first."""
    kinds = _kinds(problem)
    given = tuple(range(problem.nparts))
    if _count(kinds) <= _FEW:
        found = list(_arrangements(kinds))
    else:
        rising = tuple(sorted(given, key=lambda worker: problem.workers[worker].speed))
        found = [rising, rising[::-1], _by_pins(problem)]
    ordered = dict.fromkeys([given, *found])
    return [_seats(problem, workers) for workers in ordered]


def looped(problem: Problem, chunks: int) -> Seats:
    """Every worker in turn, `chunks` times."""
    return _seats(problem, tuple(range(problem.nparts)) * chunks)


def _kinds(problem: Problem) -> list[tuple[object, ...]]:
    """What tells each worker from others: nothing if they are alike."""
    pinned = {item.pin for item in problem.items}
    told = {w for w in pinned if w is not None}
    links = problem.options.links
    apart = isinstance(links.latency, tuple) or isinstance(links.bandwidth, tuple)
    return [
        (worker.speed, worker.memory_mb, at if at in told or apart else None)
        for at, worker in enumerate(problem.workers)
    ]


def _count(kinds: list[tuple[object, ...]]) -> int:
    return math.factorial(len(kinds)) // math.prod(math.factorial(count) for count in Counter(kinds).values())


def _arrangements(kinds: list[tuple[object, ...]]) -> Iterator[tuple[int, ...]]:
    """Orders of workers that differ; alike ones keep their own order."""
    waiting: dict[tuple[object, ...], list[int]] = {}
    for worker, kind in enumerate(kinds):
        waiting.setdefault(kind, []).append(worker)

    def extend(taken: tuple[int, ...], used: Counter[tuple[object, ...]]) -> Iterator[tuple[int, ...]]:
        if len(taken) == len(kinds):
            yield taken
            return
        for kind, workers in waiting.items():
            if used[kind] < len(workers):
                yield from extend((*taken, workers[used[kind]]), used + Counter([kind]))

    return extend((), Counter())


def _by_pins(problem: Problem) -> tuple[int, ...]:
    """Pinned workers where their items are, the others in between as they come."""
    first: dict[int, int] = {}
    for at, item in enumerate(problem.items):
        if item.pin is not None:
            first.setdefault(item.pin, at)
    pinned = iter(sorted(first, key=lambda worker: first[worker]))
    return tuple(next(pinned) if worker in first else worker for worker in range(problem.nparts))


def _seats(problem: Problem, workers: tuple[int, ...]) -> Seats:
    count, micro_batches = len(workers), problem.options.micro_batches
    return tuple(
        Seat(
            worker,
            problem.workers[worker].speed,
            problem.workers[worker].memory_mb,
            in_flight(at, count, micro_batches),
        )
        for at, worker in enumerate(workers)
    )
