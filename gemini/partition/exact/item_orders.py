"""Orders: the rows in which items can be cut into stretches.

A contiguous cut is only as good as the order it is made in. Where a graph branches there are many orders in which
values flow forward; three are tried:

    execution     as the model runs
    depth first   every item just before the first that needs it: masks and skips are made late, branches stay whole
    least live    always the ready item that leaves the fewest bytes alive: cuts are narrow
"""

from __future__ import annotations

import heapq

from gemini.partition.partition_problem import Problem

Order = tuple[int, ...]


def orders(problem: Problem) -> dict[str, Order]:
    """The distinct orders that are tried, by name."""
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
