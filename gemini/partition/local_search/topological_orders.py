"""Orders: topological orders of the items, from which chains are cut.

The order of the model itself is nearly always the best one. Others serve graphs with parallel branches, and pins that
the model's own order cannot serve: there, what the first pinned worker needs comes first.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from gemini.errors import PartitionError
from gemini.partition.partition_problem import Problem


def topological(problem: Problem, priority: Sequence[float]) -> list[int]:
    """The order that takes, of the items whose needs are met, the one of lowest priority first."""
    missing = [len(before) for before in problem.predecessors]
    ready = [(priority[at], at) for at, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, at = heapq.heappop(ready)
        order.append(at)
        for later in problem.successors[at]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (priority[later], later))
    return order


def random_order(problem: Problem, rng: random.Random) -> list[int]:
    """Any order, drawn at random."""
    return topological(problem, [rng.random() for _ in problem.items])


def pinned_order(problem: Problem) -> list[int]:
    """The order in which pinned items come worker by worker, as one stage a worker needs them.

    Raises PartitionError where pins ask that two workers each come before the other.
    """
    rank = {worker: at for at, worker in enumerate(worker_order(problem))}
    last = len(rank)
    needed = [float(last)] * len(problem.items)  # the first pinned worker that needs the item, by rank
    for at in reversed(range(len(problem.items))):
        pin = problem.items[at].pin
        own = rank[pin] if pin is not None else last
        needed[at] = min([own, *(needed[later] for later in problem.successors[at])])
    return topological(problem, needed)


def worker_order(problem: Problem) -> list[int]:
    """Pinned workers in an order that all pins allow."""
    before: dict[int, set[int]] = {item.pin: set() for item in problem.items if item.pin is not None}
    carried: list[frozenset[int]] = []  # the pins that each item comes after, its own included
    for at, item in enumerate(problem.items):
        pins = frozenset[int]().union(*(carried[earlier] for earlier in problem.predecessors[at]))
        if item.pin is not None:
            before[item.pin] |= pins - {item.pin}
            pins |= {item.pin}
        carried.append(pins)
    order: list[int] = []
    while before:
        free = [worker for worker in before if before[worker] <= set(order)]
        if not free:
            circle = sorted(before)
            raise PartitionError(
                f"pins ask that parts {circle} each come before the other, which one stage a worker cannot do\n"
                "    → allow several stages a worker (mixed=True, with metis or mpipe), or move a pin"
            )
        order.append(free[0])
        del before[free[0]]
    return order
