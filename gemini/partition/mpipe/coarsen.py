"""Coarsening: merge items that should share a stage, in phases, each on the result of the previous one.

prefix    consecutive items of the same module
zero      items without compute time, with a neighbour
heavy     across the largest values
ratio     where a cut would transfer much for little compute on either side
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemini.partition.local_search.clusters import Clusters, Rank, cluster_runs, contract, match_pairs
from gemini.partition.partition_problem import Item, Problem

_TINY = 1e-4  # share of the ideal time of a worker that counts as none
_ROUNDS = 24


@dataclass(frozen=True)
class CoarsenedProblem:
    """A coarser problem, and the cluster of each item of the finer one."""

    problem: Problem
    cluster_of: Clusters


def coarsen(problem: Problem, goal: int) -> list[CoarsenedProblem]:
    """Return ever coarser problems, down to about `goal` clusters."""
    levels: list[CoarsenedProblem] = []
    most_ms = 1.5 * sum(item.ms for item in problem.items) / max(goal, 1)

    def phase(merge: Callable[[Problem], Clusters]) -> bool:
        fine = levels[-1].problem if levels else problem
        clusters = merge(fine)
        if len(set(clusters)) == len(fine.items):
            return False
        levels.append(CoarsenedProblem(*contract(fine, clusters)))
        return True

    phase(lambda fine: cluster_runs(fine, _is_same_module, most_ms / 2))
    for _ in range(_ROUNDS):
        if not phase(lambda fine: match_pairs(fine, _rank_zero_work(fine), most_ms)):
            break
    for rank in (_rank_heavy_edges, _rank_by_ratio):
        for _ in range(_ROUNDS):
            size = len(levels[-1].problem.items) if levels else len(problem.items)
            if size <= goal or not phase(lambda fine, rank=rank: match_pairs(fine, rank(fine), most_ms)):  # type: ignore[misc]
                break
    return levels


def _is_same_module(one: Item, other: Item) -> bool:
    return one.name.rpartition(".")[0] == other.name.rpartition(".")[0] != ""


def _rank_zero_work(problem: Problem) -> Rank:
    """Rank items without compute time, across the largest value first."""
    traffic = _transferred_mb(problem)
    tiny = _TINY * problem.ideal_ms

    def rank(source: int, target: int) -> float | None:
        if min(problem.items[source].ms, problem.items[target].ms) > tiny:
            return None
        return -traffic.get((source, target), 0.0)

    return rank


def _rank_heavy_edges(problem: Problem) -> Rank:
    """Rank edges with at least the median traffic, largest first."""
    traffic = _transferred_mb(problem)
    sizes = sorted(traffic.values())
    middle = sizes[len(sizes) // 2] if sizes else 0.0
    return lambda source, target: -traffic[source, target] if traffic.get((source, target), 0.0) >= middle > 0 else None


def _rank_by_ratio(problem: Problem) -> Rank:
    """Rank by compute time per traffic, least first."""
    traffic = _transferred_mb(problem)
    items = problem.items
    tiny = _TINY * problem.ideal_ms + 1e-12

    def rank(source: int, target: int) -> float:
        return min(items[source].ms, items[target].ms) / (traffic.get((source, target), 0.0) + tiny)

    return rank


def _transferred_mb(problem: Problem) -> dict[tuple[int, int], float]:
    """Return the MB between each pair of items."""
    found: dict[tuple[int, int], float] = {}
    for value, (producer, readers) in zip(problem.values, problem.readers, strict=True):
        for reader in readers:
            found[producer, reader] = found.get((producer, reader), 0.0) + value.mb
    return found
