"""The order in which a modulo search places blocks: from the inside of the memory's nesting outwards.

A forward that allocates memory and the backward that releases it enclose everything between them:

    F0  F1  F2  F3  B3  B2  B1  B0        pairs, innermost first: (F3,B3) (F2,B2) (F1,B1) (F0,B0)
                └────┘
            └────────────┘

Placing the innermost pair first, then each next pair around it, as close as possible to the placed blocks, keeps
every residence short, and only the two ends of the placed range matter for later steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gemini.schedule.placement_problem import PlacementProblem


@dataclass(frozen=True)
class Placing:
    """The blocks in placing order; `weight[i]` is the cost in memory × time of one tick of delay at that step."""

    order: tuple[int, ...]
    weight: tuple[float, ...]


_LATENCY_WEIGHT = 1e-4  # a delay that costs no memory still lengthens the ramps


def placings(problem: PlacementProblem) -> list[Placing]:
    """Orders worth trying: nested; nested with the last blocks of each flow as fillers at the end; along the flow."""
    base = problem.single()
    paths = [base.longest_paths(block) for block in range(base.nblocks)]
    radius = _radii(base, paths)
    fillers = {block for block in range(base.nblocks) if not base.after[block] and base.before[block]}
    orders = [_order(base, radius, set())]
    for order in (_order(base, radius, fillers), list(base.topological)):
        if order not in orders:
            orders.append(order)
    return [_repeat_order(base, paths, order, problem.copies) for order in orders]


def _repeat_order(base: PlacementProblem, paths: list[dict[int, int]], order: list[int], copies: int) -> Placing:
    weights = _weights(base, paths, order)
    shifted = [block + copy * base.nblocks for copy in range(copies) for block in order]
    return Placing(tuple(shifted), tuple(weights * copies))


def _radii(problem: PlacementProblem, paths: list[dict[int, int]]) -> list[float]:
    """For every block, the residence of the innermost pair that encloses it; infinite outside of all."""
    pairs = []
    for blocks in problem.on_device:
        for take in blocks:
            if problem.memory[take] > 0:
                pairs += [
                    (paths[take][give] + problem.span[give], take, give)
                    for give in blocks
                    if problem.memory[give] < 0 and give in paths[take]
                ]
    radius = [math.inf] * problem.nblocks
    paired: set[int] = set()
    for residence, take, give in sorted(set(pairs)):
        if take not in paired and give not in paired:
            paired |= {take, give}
            for block in paths[take]:
                if give in paths[block]:
                    radius[block] = min(radius[block], residence)
    return radius


def _order(problem: PlacementProblem, radius: list[float], fillers: set[int]) -> list[int]:
    order: list[int] = []
    for component in problem.flows:
        left = set(component) - fillers
        placed: set[int] = set()
        reachable: set[int] = set()
        while left:
            if reachable:
                block = min(reachable, key=lambda b: _rank(problem, radius, placed, b))
            elif placed:  # only fillers connect the rest: restart from there
                block = min(left, key=lambda b: (radius[b], problem.head[b], b))
            else:
                block = _root(problem, radius, left)
            order.append(block)
            placed.add(block)
            left.discard(block)
            reachable.discard(block)
            reachable |= {other for other in _neighbours(problem, block) if other in left}
    return order + sorted(fillers, key=lambda block: (radius[block], block))


def _root(problem: PlacementProblem, radius: list[float], blocks: set[int]) -> int:
    if any(math.isfinite(radius[block]) for block in blocks):
        return min(blocks, key=lambda b: (radius[b], -problem.head[b], b))
    return min(blocks, key=lambda b: (problem.head[b], b))


def _rank(problem: PlacementProblem, radius: list[float], placed: set[int], block: int) -> tuple[float, int, int]:
    """Innermost first; backwards in time before the placed blocks, forwards after them."""
    backwards = any(later in placed for later, _ in problem.after[block])
    return (radius[block], -problem.head[block] if backwards else problem.head[block], block)


def _neighbours(problem: PlacementProblem, block: int) -> Iterable[int]:
    for other, _ in (*problem.before[block], *problem.after[block]):
        yield other


def _weights(problem: PlacementProblem, paths: list[dict[int, int]], order: list[int]) -> list[float]:
    """The memory, in shares of the devices, of all later blocks that a delay at one step moves."""
    share = []
    for block, amount in enumerate(problem.memory):
        caps = [problem.caps[dev] for dev in problem.devices[block]]
        share.append(_LATENCY_WEIGHT + max(abs(amount) / cap if cap else 0.0 for cap in caps))
    before: list[set[int]] = [set() for _ in order]
    for block, reach in enumerate(paths):
        for later in reach:
            before[later].add(block)
    placed: set[int] = set()
    weights = []
    for block in order:
        forwards = any(prev in placed for prev, _ in problem.before[block])
        moved = paths[block] if forwards else before[block]
        weights.append(share[block] + sum(share[other] for other in moved if other not in placed and other != block))
        placed.add(block)
    return weights
