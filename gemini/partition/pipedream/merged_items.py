"""Merged items: consecutive items merged until the dynamic program has few enough cut positions."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gemini.partition.exact.prefix_costs import Floats, SegmentCosts
from gemini.partition.local_search.clusters import Clusters, contract
from gemini.partition.partition_problem import Problem


@dataclass(frozen=True)
class MergedItems:
    """A problem of few clusters, in execution order, and the cluster of each item."""

    problem: Problem
    cluster_of: Clusters

    @cached_property
    def costs(self) -> SegmentCosts:
        """The costs of all segments."""
        return SegmentCosts(self.problem, tuple(range(self.size)))

    @property
    def size(self) -> int:
        """The number of clusters."""
        return len(self.problem.items)

    @cached_property
    def work(self) -> Floats:
        """The time of each segment [row, column) on a worker of speed 1; infinite for empty segments."""
        found = self.costs.work[None, :] - self.costs.work[:, None]
        found[np.tril_indices(self.size + 1)] = np.inf
        return found

    @cached_property
    def gradients_mb(self) -> Floats:
        """The gradient MB of each segment, shared parameters once."""
        sizes = {n: mb if n in self.problem.trainable else 0.0 for n, mb in self.problem.parameters_mb.items()}
        plain = replace(self.problem, parameters_mb=sizes, trainable=frozenset())
        everywhere = range(self.size + 1)
        return SegmentCosts(plain, self.costs.order).weights.window(everywhere, everywhere)

    @cached_property
    def crossing(self) -> tuple[Floats, Floats]:
        """The number of messages and the MB across each cut, gradients included."""
        count, size = np.zeros(self.size + 2), np.zeros(self.size + 2)
        for value, (producer, readers) in zip(self.problem.values, self.problem.readers, strict=True):
            messages = 1 + (value.backward_mb > 0)
            for table, amount in ((count, messages), (size, value.mb)):
                table[producer + 1] += amount
                table[max(readers) + 1] -= amount
        return np.cumsum(count)[:-1], np.maximum(np.cumsum(size)[:-1], 0.0)

    def memory(self, in_flight: int) -> Floats:
        """Return the MB of each segment."""
        everywhere = range(self.size + 1)
        return self.costs.memory(everywhere, everywhere, in_flight)


def merge_items(problem: Problem, most: int) -> MergedItems:
    """Merge consecutive items, the lightest neighbours first, until `most` clusters are left."""
    count = len(problem.items)
    if count <= most:
        return MergedItems(problem, list(range(count)))
    work = [item.ms for item in problem.items]
    pin = [item.pin for item in problem.items]
    following = list(range(1, count + 1))
    before = list(range(-1, count - 1))
    alive = [True] * count
    version = [0] * count
    heap = [(work[at] + work[at + 1], at, 0, 0) for at in range(count - 1)]
    heapq.heapify(heap)
    left = count
    while left > most and heap:
        _, at, mine, its = heapq.heappop(heap)
        other = following[at]
        if not alive[at] or other >= count or version[at] != mine or version[other] != its:
            continue
        if pin[at] is not None and pin[other] is not None and pin[at] != pin[other]:
            continue
        alive[other] = False
        work[at] += work[other]
        pin[at] = pin[at] if pin[at] is not None else pin[other]
        version[at] += 1
        following[at] = following[other]
        left -= 1
        if following[at] < count:
            before[following[at]] = at
            heapq.heappush(heap, (work[at] + work[following[at]], at, version[at], version[following[at]]))
        if before[at] >= 0:
            heapq.heappush(heap, (work[before[at]] + work[at], before[at], version[before[at]], version[at]))
    clusters: list[int] = []
    for at in range(count):
        clusters.append(at if alive[at] else clusters[-1])
    return MergedItems(*contract(problem, clusters))
