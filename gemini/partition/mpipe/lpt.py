"""Longest processing time first: assign pieces to workers, the longest first, each to the worker that ends earliest.

Among workers that would end about equally early, the one with most of the piece's traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.partition_problem import Problem

_CLOSE = 0.02  # share of the ideal time that counts as equal


def assign_pieces(problem: Problem, piece_of: Sequence[int]) -> list[int]:
    """Return the worker of each piece."""
    members: list[list[int]] = [[] for _ in range(max(piece_of) + 1)]
    for at, piece in enumerate(piece_of):
        members[piece].append(at)
    work = [sum(problem.items[at].ms for at in items) for items in members]
    pins = [
        next((problem.items[at].pin for at in items if problem.items[at].pin is not None), None) for items in members
    ]
    exchanged = _exchanged_mb(problem, piece_of)
    loads = [0.0] * problem.nparts
    assigned: list[list[int]] = [[] for _ in range(problem.nparts)]
    worker_of = [-1] * len(members)
    for piece in sorted(range(len(members)), key=lambda piece: (pins[piece] is None, -work[piece], piece)):
        done = [load + work[piece] / who.speed for load, who in zip(loads, problem.workers, strict=True)]
        able = [worker for worker in range(problem.nparts) if _fits(problem, assigned[worker] + members[piece], worker)]
        pin = pins[piece]
        candidates = [pin] if pin is not None else able or range(problem.nparts)
        limit = min(done[worker] for worker in candidates) + _CLOSE * problem.ideal_ms
        near = [worker for worker in candidates if done[worker] <= limit]
        local_mb = {worker: sum(exchanged[piece].get(p, 0.0) for p in _pieces(worker_of, worker)) for worker in near}
        chosen = min(near, key=lambda worker: (-local_mb[worker], done[worker], worker))
        worker_of[piece] = chosen
        loads[chosen] = done[chosen]
        assigned[chosen] += members[piece]
    return worker_of


def _pieces(worker_of: Sequence[int], worker: int) -> list[int]:
    return [piece for piece, other in enumerate(worker_of) if other == worker]


def _fits(problem: Problem, items: Sequence[int], worker: int) -> bool:
    limit = problem.workers[worker].memory_mb
    return limit is None or problem.memory_mb(items, problem.options.micro_batches) <= limit


def _exchanged_mb(problem: Problem, piece_of: Sequence[int]) -> list[dict[int, float]]:
    """Return the MB between each pair of pieces."""
    found: list[dict[int, float]] = [{} for _ in range(max(piece_of) + 1)]
    for value, (producer, readers) in zip(problem.values, problem.readers, strict=True):
        one = piece_of[producer]
        for other in {piece_of[reader] for reader in readers} - {one}:
            found[one][other] = found[one].get(other, 0.0) + value.mb
            found[other][one] = found[other].get(one, 0.0) + value.mb
    return found
