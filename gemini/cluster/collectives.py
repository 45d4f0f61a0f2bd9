"""Collectives as costs: the time of all-reduce, all-gather and others on a group of ranks.

    ring           2(n−1)/n · B / bandwidth + 2(n−1) · latency       one link per rank, all busy all the time
    tree           2 · B / bandwidth + 2 · depth · latency           depth = Σ log2 over the tiers
    hierarchical   reduce-scatter inside, all-reduce outside on 1/k of the bytes, all-gather inside

B is the size of the whole tensor in bytes: what every rank holds before an all-reduce and after an all-gather. The
algorithm with the least time is taken, as communication libraries do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gemini.cluster.rank_group import RankGroup
from gemini.errors import ConfigError, Fault
from gemini.nearest_name import remedy


def ring_all_reduce(group: RankGroup, nbytes: float) -> float:
    """Return the time of an all-reduce on a ring."""
    return 2 * _ring_pass(group, nbytes)


def tree_all_reduce(group: RankGroup, nbytes: float) -> float:
    """Return the time of an all-reduce up and down a binary tree, pipelined in small pieces."""
    if group.ranks < 2:
        return 0.0
    depth = sum(math.ceil(math.log2(ranks)) * latency for ranks, _, latency in group.levels)
    return 2 * nbytes / group.ring_bandwidth + 2 * depth


def hierarchical_all_reduce(group: RankGroup, nbytes: float) -> float:
    """Return the time of an all-reduce tier by tier: each tier works on the part of the tensor of the tier below."""
    total, part = 0.0, nbytes
    for ranks, bandwidth, latency in group.levels:
        total += 2 * ((ranks - 1) / ranks * part / bandwidth + (ranks - 1) * latency)
        part /= ranks
    return total


ALL_REDUCES: dict[str, Callable[[RankGroup, float], float]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "hierarchical": hierarchical_all_reduce,
}


def all_reduce(group: RankGroup, nbytes: float, algorithm: str = "") -> float:
    """Return the time of an all-reduce, by the fastest algorithm or the named one."""
    if algorithm:
        if algorithm not in ALL_REDUCES:
            raise ConfigError([Fault(f"unknown algorithm {algorithm!r}", remedy(algorithm, ALL_REDUCES))], "cluster")
        return ALL_REDUCES[algorithm](group, nbytes)
    return min(cost(group, nbytes) for cost in ALL_REDUCES.values())


def all_gather(group: RankGroup, nbytes: float) -> float:
    """Return the time until every rank has all `nbytes`, of which each has its part."""
    return min(_ring_pass(group, nbytes), hierarchical_all_reduce(group, nbytes) / 2)


def reduce_scatter(group: RankGroup, nbytes: float) -> float:
    """Return the time until every rank has its part of the sum of tensors of `nbytes`."""
    return all_gather(group, nbytes)


def all_to_all(group: RankGroup, nbytes: float) -> float:
    """Return the time in which every rank sends `nbytes`, an equal part to each rank; the slowest tier bounds it."""
    ranks, slowest, latency, near = group.ranks, 0.0, 0.0, 1
    for part, bandwidth, delay in zip(group.fanout, group.bandwidth, group.latency):
        if part > 1:
            away = (ranks - near) / ranks  # the share that leaves the unit below
            slowest = max(slowest, nbytes * away / bandwidth)
            latency += delay
        near *= part
    return slowest + latency


def send(group: RankGroup, nbytes: float) -> float:
    """Return the time of a transfer between neighbours of the group, over the widest tier that it spans."""
    spanned = group.levels
    if not spanned:
        return 0.0
    _, bandwidth, latency = spanned[-1]
    return nbytes / bandwidth + latency


def _ring_pass(group: RankGroup, nbytes: float) -> float:
    ranks = group.ranks
    if ranks < 2:
        return 0.0
    return (ranks - 1) / ranks * nbytes / group.ring_bandwidth + (ranks - 1) * group.ring_latency
