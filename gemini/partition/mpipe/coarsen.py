"""Coarsening: merge what should not be cut apart, in phases, each on the result of the one before.

prefix    consecutive items of the same module
zero      items that take no time, with a neighbour
heavy     across the largest values
ratio     where a cut would move much for little work on either side (computing over communication)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemini.partition.local_search.clusters import Clusters, Rank, contract, pairs, runs
from gemini.partition.partition_problem import Item, Problem

_TINY = 1e-4  # of the ideal time of a worker: no time at all
_ROUNDS = 24


@dataclass(frozen=True)
class Coarse:
    """A coarser problem, and the cluster of each item of the finer one."""

    problem: Problem
    cluster_of: Clusters


def coarsen(problem: Problem, goal: int) -> list[Coarse]:
    """Ever coarser problems, towards a number of clusters."""
    levels: list[Coarse] = []
    most_ms = 1.5 * sum(item.ms for item in problem.items) / max(goal, 1)

    def phase(merge: Callable[[Problem], Clusters]) -> bool:
        fine = levels[-1].problem if levels else problem
        clusters = merge(fine)
        if len(set(clusters)) == len(fine.items):
            return False
        levels.append(Coarse(*contract(fine, clusters)))
        return True

    phase(lambda fine: runs(fine, _same_module, most_ms / 2))
    for _ in range(_ROUNDS):
        if not phase(lambda fine: pairs(fine, _zero(fine), most_ms)):
            break
    for rank in (_heavy, _ratio):
        for _ in range(_ROUNDS):
            size = len(levels[-1].problem.items) if levels else len(problem.items)
            if size <= goal or not phase(lambda fine, rank=rank: pairs(fine, rank(fine), most_ms)):  # type: ignore[misc]
                break
    return levels


def _same_module(one: Item, other: Item) -> bool:
    return one.name.rpartition(".")[0] == other.name.rpartition(".")[0] != ""


def _zero(problem: Problem) -> Rank:
    """Items without work join a neighbour, across the largest value first."""
    moved = _moved(problem)
    tiny = _TINY * problem.ideal_ms

    def rank(source: int, target: int) -> float | None:
        if min(problem.items[source].ms, problem.items[target].ms) > tiny:
            return None
        return -moved.get((source, target), 0.0)

    return rank


def _heavy(problem: Problem) -> Rank:
    """Only edges that move at least as much as most do."""
    moved = _moved(problem)
    sizes = sorted(moved.values())
    middle = sizes[len(sizes) // 2] if sizes else 0.0
    return lambda source, target: -moved[source, target] if moved.get((source, target), 0.0) >= middle > 0 else None


def _ratio(problem: Problem) -> Rank:
    """Little work for much that moves comes first."""
    moved = _moved(problem)
    items = problem.items
    tiny = _TINY * problem.ideal_ms + 1e-12

    def rank(source: int, target: int) -> float:
        return min(items[source].ms, items[target].ms) / (moved.get((source, target), 0.0) + tiny)

    return rank


def _moved(problem: Problem) -> dict[tuple[int, int], float]:
    """MB between each two items."""
    found: dict[tuple[int, int], float] = {}
    for value, (producer, readers) in zip(problem.values, problem.readers, strict=True):
        for reader in readers:
            found[producer, reader] = found.get((producer, reader), 0.0) + value.mb
    return found
