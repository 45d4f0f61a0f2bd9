"""Packing: pieces go to workers, the longest first, each to the worker that is done with it earliest.

Among workers that would be done about equally early, the one that already holds most of what the piece exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.partition_problem import Problem

_CLOSE = 0.02  # of the ideal time


def pack(problem: Problem, piece_of: Sequence[int]) -> list[int]:
    """The worker of each piece."""
    members: list[list[int]] = [[] for _ in range(max(piece_of) + 1)]
    for at, piece in enumerate(piece_of):
        members[piece].append(at)
    work = [sum(problem.items[at].ms for at in items) for items in members]
    pins = [
        next((problem.items[at].pin for at in items if problem.items[at].pin is not None), None) for items in members
    ]
    exchanged = _exchanged(problem, piece_of)
    loads = [0.0] * problem.nparts
    held: list[list[int]] = [[] for _ in range(problem.nparts)]
    worker_of = [-1] * len(members)
    for piece in sorted(range(len(members)), key=lambda piece: (pins[piece] is None, -work[piece], piece)):
        done = [load + work[piece] / who.speed for load, who in zip(loads, problem.workers, strict=True)]
        able = [worker for worker in range(problem.nparts) if _fits(problem, held[worker] + members[piece], worker)]
        pin = pins[piece]
        candidates = [pin] if pin is not None else able or range(problem.nparts)
        limit = min(done[worker] for worker in candidates) + _CLOSE * problem.ideal_ms
        near = [worker for worker in candidates if done[worker] <= limit]
        near_held = {worker: sum(exchanged[piece].get(p, 0.0) for p in _pieces(worker_of, worker)) for worker in near}
        chosen = min(near, key=lambda worker: (-near_held[worker], done[worker], worker))
        worker_of[piece] = chosen
        loads[chosen] = done[chosen]
        held[chosen] += members[piece]
    return worker_of


def _pieces(worker_of: Sequence[int], worker: int) -> list[int]:
    return [piece for piece, other in enumerate(worker_of) if other == worker]


def _fits(problem: Problem, items: Sequence[int], worker: int) -> bool:
    limit = problem.workers[worker].memory_mb
    return limit is None or problem.memory_mb(items, problem.options.micro_batches) <= limit


def _exchanged(problem: Problem, piece_of: Sequence[int]) -> list[dict[int, float]]:
    """MB between each two pieces."""
    found: list[dict[int, float]] = [{} for _ in range(max(piece_of) + 1)]
    for value, (producer, readers) in zip(problem.values, problem.readers, strict=True):
        one = piece_of[producer]
        for other in {piece_of[reader] for reader in readers} - {one}:
            found[one][other] = found[one].get(other, 0.0) + value.mb
            found[other][one] = found[other].get(one, 0.0) + value.mb
    return found
