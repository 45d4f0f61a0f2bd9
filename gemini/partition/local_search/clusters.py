"""Clustering: merge items such that the graph of clusters stays acyclic.

Three rules, each safe for all its clusters at once:
  - *runs*: consecutive items of the order;
  - *pairs*: an item and its only predecessor, or its only successor. Every path into the pair reaches every path out of
    it, so a cycle of pairs would have been a cycle of items;
  - *siblings*: readers of one value at equal depth in the graph. Edges lead from each depth to a greater one.

A clustered problem is again a `Problem`, so every algorithm on items works on clusters.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from gemini.partition.partition_problem import ORDER, Edge, Item, Problem

Clusters = list[int]  # the cluster of each item
Rank = Callable[[int, int], float | None]  # of a pair (source, target): lower is merged first, None is never merged


def contract(problem: Problem, clusters: Sequence[int]) -> tuple[Problem, Clusters]:
    """Return the problem of clusters, in topological order, and the cluster of each item."""
    number = number_in_order(problem, clusters)
    cluster_of = [number[cluster] for cluster in clusters]
    members: list[list[Item]] = [[] for _ in number]
    for item, cluster in zip(problem.items, cluster_of, strict=True):
        members[cluster].append(item)
    place: dict[int, int] = {}
    edges: dict[Edge, None] = {}
    for edge in problem.edges:
        one, other = cluster_of[edge.source], cluster_of[edge.target]
        if one != other:
            value = ORDER if edge.value == ORDER else place.setdefault(edge.value, len(place))
            edges[Edge(one, other, value)] = None
    made = Problem(
        tuple(_merge_items(items) for items in members),
        tuple(edges),
        tuple(problem.values[value] for value in place),
        problem.nparts,
        problem.options,
        problem.parameters_mb,
        problem.trainable,
        problem.saved_mb,
    )
    return made, cluster_of


def _merge_items(items: Sequence[Item]) -> Item:
    if len(items) == 1:
        return items[0]
    return Item(
        name=items[0].name,
        nodes=tuple(sorted(node for item in items for node in item.nodes)),
        ms=sum(item.ms for item in items),
        forward_ms=sum(item.forward_ms for item in items),
        backward_ms=sum(item.backward_ms for item in items),
        parameters=tuple(dict.fromkeys(name for item in items for name in item.parameters)),
        saved_own_mb=sum(item.saved_own_mb for item in items),
        saved_values=tuple(sorted({value for item in items for value in item.saved_values})),
        peak_mb=max(item.peak_mb for item in items),
        pin=next((item.pin for item in items if item.pin is not None), None),
    )


def number_in_order(problem: Problem, clusters: Sequence[int]) -> dict[int, int]:
    """Number clusters (or stages) in topological order, ties by their earliest item."""
    first: dict[int, int] = {}
    for at, cluster in enumerate(clusters):
        first.setdefault(cluster, at)
    after: dict[int, set[int]] = {cluster: set() for cluster in first}
    missing = dict.fromkeys(first, 0)
    for edge in problem.edges:
        one, other = clusters[edge.source], clusters[edge.target]
        if one != other and other not in after[one]:
            after[one].add(other)
            missing[other] += 1
    ready = [(first[cluster], cluster) for cluster, count in missing.items() if not count]
    heapq.heapify(ready)
    number: dict[int, int] = {}
    while ready:
        _, cluster = heapq.heappop(ready)
        number[cluster] = len(number)
        for other in after[cluster]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (first[other], other))
    if len(number) != len(first):
        raise AssertionError("clusters depend on each other")
    return number


def cluster_runs(problem: Problem, same: Callable[[Item, Item], bool], most_ms: float) -> Clusters:
    """Cluster consecutive items for which `same` holds, up to `most_ms` of work each."""
    clusters: Clusters = []
    work, pin = 0.0, None
    for at, item in enumerate(problem.items):
        fits = work + item.ms <= most_ms and (pin is None or item.pin is None or pin == item.pin)
        if at and fits and same(problem.items[at - 1], item):
            clusters.append(clusters[-1])
            work, pin = work + item.ms, item.pin if item.pin is not None else pin
        else:
            clusters.append(at)
            work, pin = item.ms, item.pin
    return clusters


def match_pairs(problem: Problem, rank: Rank, most_ms: float) -> Clusters:
    """Match items with their only predecessor or only successor, lowest rank first."""
    items = problem.items
    found = []
    for source, afters in enumerate(problem.successors):
        for target in afters:
            if len(afters) > 1 and len(problem.predecessors[target]) > 1:
                continue
            worth = rank(source, target) if _may_join(items[source], items[target], most_ms) else None
            if worth is not None:
                found.append((worth, source, target))
    clusters = list(range(len(items)))
    taken = [False] * len(items)
    for _, source, target in sorted(found):
        if not taken[source] and not taken[target]:
            taken[source] = taken[target] = True
            clusters[target] = source
    return clusters


def match_siblings(problem: Problem, most_ms: float) -> Clusters:
    """Match items of equal depth that read the same value."""
    depth = [0] * len(problem.items)
    for at, before in enumerate(problem.predecessors):
        depth[at] = max((depth[other] + 1 for other in before), default=0)
    clusters = list(range(len(problem.items)))
    taken = [False] * len(problem.items)
    for _, readers in problem.readers:
        waiting: dict[int, int] = {}
        for reader in readers:
            if taken[reader]:
                continue
            other = waiting.pop(depth[reader], None)
            if other is None or not _may_join(problem.items[other], problem.items[reader], most_ms):
                waiting[depth[reader]] = reader
            else:
                taken[other] = taken[reader] = True
                clusters[reader] = other
    return clusters


def _may_join(one: Item, other: Item, most_ms: float) -> bool:
    apart = one.pin is not None and other.pin is not None and one.pin != other.pin
    return not apart and one.ms + other.ms <= most_ms
