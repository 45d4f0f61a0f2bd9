"""Rank group: the ranks of one collective, and where the hierarchy of the cluster puts them.

Ranks are numbered along the axes of the parallelism, the innermost first, and device r is rank r. An axis of degree n
whose neighbours are s ranks apart has groups {b, b + s, …, b + (n − 1)s}:

    hosts of 4      │ 0 1 2 3 │ 4 5 6 7 │          axis of degree 2, stride 1:   {0 1} {2 3} …    inside a host
                                                    axis of degree 4, stride 2:   {0 2 4 6} …      2 per host, 2 hosts

Ranks of a ring on one host share its links with the other groups of the same axis: when all groups communicate at the
same time, each rank has the bandwidth of one device, so a ring of k ranks on a host leaves it over k network cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gemini.cluster.cluster_description import Cluster


@dataclass(frozen=True)
class RankGroup:
    """`fanout[i]` units of tier i−1 (ranks for tier 0) of the group lie in one unit of tier i; their product is the
    number of ranks. `bandwidth[i]` and `latency[i]` are of one rank at tier i.
    """

    fanout: tuple[int, ...]
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        count = 1
        for part in self.fanout:
            count *= part
        return count

    @cached_property
    def ring_bandwidth(self) -> float:
        """Return the bytes per second of a ring over all ranks: a unit with k ranks leaves it over k links."""
        inside, best = 1, float("inf")
        for part, bandwidth in zip(self.fanout, self.bandwidth):
            if part > 1:
                best = min(best, inside * bandwidth)
            inside *= part
        return best

    @cached_property
    def ring_latency(self) -> float:
        """Return the mean latency of a hop of the ring."""
        hops, total, inside = self.ranks, 0.0, self.ranks
        for part, latency in zip(self.fanout, self.latency):
            crossing = inside // part if part > 1 else inside  # hops that leave a unit of this tier
            total += (inside - crossing) * latency
            inside = crossing
        widest = max((level for level, part in enumerate(self.fanout) if part > 1), default=0)
        return (total + inside * self.latency[widest]) / hops

    @cached_property
    def levels(self) -> list[tuple[int, float, float]]:
        """(ranks, bandwidth, latency) of the tiers that the group spans, innermost first."""
        return [
            (part, bandwidth, latency)
            for part, bandwidth, latency in zip(self.fanout, self.bandwidth, self.latency)
            if part > 1
        ]


def group_on(cluster: Cluster, ranks: int, stride: int = 1) -> RankGroup:
    """Return the group of `ranks` ranks that are `stride` apart."""
    fanout, left, inside = [], ranks, 1
    sizes = cluster.tier_sizes()
    for level, size in enumerate(sizes):
        # A unit of `size` devices has size / stride of the ranks, if the axis is longer than that.
        part = left if level == len(sizes) - 1 else min(left, max(1, -(-size // (stride * inside))))
        while left % part:  # uneven groups: the nearest smaller divisor keeps the product exact
            part -= 1
        fanout.append(part)
        left //= part
        inside *= part
    return RankGroup(
        tuple(fanout),
        tuple(cluster.device_bandwidth(level) for level in range(len(sizes))),
        tuple(tier.latency for tier in cluster.tiers),
    )
