"""Stage slots: the worker of each contiguous segment, from the first stage to the last.

Identical workers are interchangeable, so only orders that differ in speed, memory or pinned items are tried: all of
them where they are few, else the given order and the orders by rising and falling speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gemini.partition.partition_problem import Problem, in_flight

_FEW = 120


@dataclass(frozen=True)
class StageSlot:
    """One position of the pipeline: its worker, and the micro-batches in flight."""

    worker: int
    speed: float
    memory_mb: float | None
    in_flight: int


StageSlots = tuple[StageSlot, ...]


def slot_orders(problem: Problem) -> list[StageSlots]:
    """Return the orders of workers to try, the given one first."""
    kinds = _kinds(problem)
    given = tuple(range(problem.nparts))
    if _count(kinds) <= _FEW:
        found = list(_arrangements(kinds))
    else:
        rising = tuple(sorted(given, key=lambda worker: problem.workers[worker].speed))
        found = [rising, rising[::-1], _by_pins(problem)]
    ordered = dict.fromkeys([given, *found])
    return [_make_slots(problem, workers) for workers in ordered]


def looped_slots(problem: Problem, chunks: int) -> StageSlots:
    """Return slots for every worker in turn, `chunks` times."""
    return _make_slots(problem, tuple(range(problem.nparts)) * chunks)


def _kinds(problem: Problem) -> list[tuple[object, ...]]:
    """Return a key per worker, equal for interchangeable workers."""
    pinned = {item.pin for item in problem.items}
    named = {w for w in pinned if w is not None}
    links = problem.options.links
    apart = isinstance(links.latency, tuple) or isinstance(links.bandwidth, tuple)
    return [
        (worker.speed, worker.memory_mb, at if at in named or apart else None)
        for at, worker in enumerate(problem.workers)
    ]


def _count(kinds: list[tuple[object, ...]]) -> int:
    return math.factorial(len(kinds)) // math.prod(math.factorial(count) for count in Counter(kinds).values())


def _arrangements(kinds: list[tuple[object, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the distinct orders of workers; interchangeable workers keep their order."""
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
    """Return pinned workers in the order of their items, the rest at their own numbers."""
    first: dict[int, int] = {}
    for at, item in enumerate(problem.items):
        if item.pin is not None:
            first.setdefault(item.pin, at)
    pinned = iter(sorted(first, key=lambda worker: first[worker]))
    return tuple(next(pinned) if worker in first else worker for worker in range(problem.nparts))


def _make_slots(problem: Problem, workers: tuple[int, ...]) -> StageSlots:
    count, micro_batches = len(workers), problem.options.micro_batches
    return tuple(
        StageSlot(
            worker,
            problem.workers[worker].speed,
            problem.workers[worker].memory_mb,
            in_flight(at, count, micro_batches),
        )
        for at, worker in enumerate(workers)
    )
