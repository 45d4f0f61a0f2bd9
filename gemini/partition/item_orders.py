"""Topological orders of the items, from which contiguous segments are cut.

A contiguous cut is only as good as its order. Where a graph branches there are many topological orders; three are
tried:

    execution     as the model runs
    depth first   every item just before its first reader: masks and skips are produced late, branches stay together
    least live    always the ready item that leaves the fewest bytes live: cuts transfer few bytes

Random orders serve graphs with parallel branches, and pin orders serve pins that the execution order contradicts.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from gemini.errors import PartitionError
from gemini.partition.partition_problem import Problem

Order = tuple[int, ...]


def item_orders(problem: Problem) -> dict[str, Order]:
    """Return the distinct orders to try, by name."""
    found: dict[str, Order] = {"execution": tuple(range(len(problem.items)))}
    for name, order in (("depth first", _depth_first(problem)), ("least live", _least_live(problem))):
        if order not in found.values():
            found[name] = order
    return found


def _depth_first(problem: Problem) -> Order:
    placed = [False] * len(problem.items)
    order: list[int] = []
    for item in range(len(problem.items)):
        if problem.successors[item] or placed[item]:
            continue
        pending = [(item, iter(problem.predecessors[item]))]
        placed[item] = True
        while pending:
            at, needed = pending[-1]
            following = next((one for one in needed if not placed[one]), None)
            if following is None:
                order.append(at)
                pending.pop()
            else:
                placed[following] = True
                pending.append((following, iter(problem.predecessors[following])))
    return tuple(order)


def _least_live(problem: Problem) -> Order:
    missing = [len(needed) for needed in problem.predecessors]
    left = [len(readers) for _, readers in problem.readers]
    reads: list[list[int]] = [[] for _ in problem.items]
    growth = [0.0] * len(problem.items)  # of the bytes alive when the item is placed
    for value, (producer, readers) in enumerate(problem.readers):
        growth[producer] += problem.values[value].mb
        for reader in readers:
            reads[reader].append(value)
            if len(readers) == 1:
                growth[reader] -= problem.values[value].mb
    ready = [(growth[item], item) for item, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    placed: set[int] = set()
    order: list[int] = []
    while ready:
        grown, item = heapq.heappop(ready)
        if item in placed or grown != growth[item]:
            continue  # an entry from before its growth changed
        placed.add(item)
        order.append(item)
        for value in reads[item]:
            left[value] -= 1
            if left[value] == 1:
                last = next(reader for reader in problem.readers[value][1] if reader not in placed)
                growth[last] -= problem.values[value].mb
                if not missing[last]:
                    heapq.heappush(ready, (growth[last], last))
        for follower in problem.successors[item]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (growth[follower], follower))
    return tuple(order)


def topological_order(problem: Problem, priority: Sequence[float]) -> list[int]:
    """Return the topological order that always takes the ready item of lowest priority value."""
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


def random_topological_order(problem: Problem, rng: random.Random) -> list[int]:
    """Return a random topological order."""
    return topological_order(problem, [rng.random() for _ in problem.items])


def order_by_pins(problem: Problem) -> list[int]:
    """Return an order with pinned items grouped by worker, as required for one stage per worker.

    Raises PartitionError where pins require two workers to precede each other.
    """
    rank = {worker: at for at, worker in enumerate(order_pinned_workers(problem))}
    last = len(rank)
    needed = [float(last)] * len(problem.items)  # the first pinned worker that needs the item, by rank
    for at in reversed(range(len(problem.items))):
        pin = problem.items[at].pin
        own = rank[pin] if pin is not None else last
        needed[at] = min([own, *(needed[later] for later in problem.successors[at])])
    return topological_order(problem, needed)


def order_pinned_workers(problem: Problem) -> list[int]:
    """Return the pinned workers in an order that satisfies all pins."""
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
            cycle = sorted(before)
            raise PartitionError(
                f"pins require parts {cycle} to precede each other, which is impossible with one stage per worker\n"
                "    → allow several stages per worker (mixed=True, with metis or mpipe), or move a pin"
            )
        order.append(free[0])
        del before[free[0]]
    return order
