"""Replicated pipelines: a stage may have several workers, which share its micro-batches and all-reduce its gradients
after each batch.

A stage of r replicas takes 1/r of the time plus a ring all-reduce of its gradients. The network may have levels
(workers of a machine, machines): a stage of the outer level is a whole pipeline of the inner one.

    outer    ├───── 2 machines ─────┼── 1 machine ──┤
    inner    ├─ 3 workers ─┼─ 1 ────┤   …

Workers count as equally fast, at their average speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemini.partition.exact.prefix_costs import Floats, Ints
from gemini.partition.pipedream.merged_items import MergedItems
from gemini.schedule.link_costs import Links

_MESSAGE = 1 << 20  # bytes


@dataclass(frozen=True)
class Network:
    """One network level: the number of units of the level below, and their links (ms, bytes per ms)."""

    count: int
    latency: float
    bandwidth: float  # 0: size does not matter

    def transfer(self, messages: Floats, mb: Floats) -> Floats:
        """Return the time of a number of messages with a total size."""
        return messages * self.latency + (mb * (1 << 20) / self.bandwidth if self.bandwidth else 0.0)

    def reduction(self, mb: Floats, replicas: int) -> Floats:
        """Return the time of a ring all-reduce."""
        rounds = 2 * (replicas - 1)
        return np.where(mb > 0, self.transfer(np.full_like(mb, rounds), mb * rounds / replicas), 0.0)


@dataclass(frozen=True)
class ReplicatedStage:
    """A segment of the clusters and its workers."""

    begin: int
    end: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class _Table:
    """The best time of every segment for each number of units, and the last stage of that pipeline."""

    times: list[Floats]
    begins: list[Ints]
    replicas: list[Ints]


Levels = list[tuple[_Table, Network]]  # the innermost first


def find_replicated(items: MergedItems) -> tuple[float, list[ReplicatedStage]]:
    """Return the least time of the slowest stage per batch (ms), and the stages."""
    problem = items.problem
    networks = network_levels(problem.options.links, problem.nparts)
    speed = sum(worker.speed for worker in problem.workers) / problem.nparts
    unit = items.work / speed
    tables = []
    for network in networks:
        tables.append(_solve(items, unit, network))
        unit = tables[-1].times[network.count]
    stages = _trace(list(zip(tables, networks, strict=True)), (0, items.size), list(range(problem.nparts)))
    return float(tables[-1].times[networks[-1].count][0, items.size]), stages


def _solve(items: MergedItems, unit: Floats, network: Network) -> _Table:
    """Solve pipelines of 1 … count units over every segment."""
    messages, size = items.crossing
    crossing = network.transfer(messages * items.problem.options.micro_batches, size)
    alone = [unit / r + network.reduction(items.gradients_mb, r) for r in range(1, network.count + 1)]
    rows = np.arange(items.size + 1)
    table = _Table([unit], [np.repeat(rows[:, None], items.size + 1, 1)], [np.zeros(unit.shape, dtype=np.int64)])
    for units in range(1, network.count + 1):
        times, begins = alone[units - 1].copy(), np.repeat(rows[:, None], items.size + 1, 1)
        chosen = np.full(times.shape, units, dtype=np.int64)
        for last in range(1, units):
            arriving = np.maximum(table.times[units - last], crossing[None, :])
            for begin in range(1, items.size):  # where the last stage begins
                found = np.maximum(arriving[:, begin, None], alone[last - 1][begin][None, :])
                better = found < times * (1 - 1e-9)
                times[better] = found[better]
                begins[better] = begin
                chosen[better] = last
        table.times.append(times)
        table.begins.append(begins)
        table.replicas.append(chosen)
    return table


def _trace(nested: Levels, segment: tuple[int, int], workers: list[int]) -> list[ReplicatedStage]:
    """Return the stages of a segment on workers; workers of equal stages of inner replicas are joined."""
    if not nested:
        return [ReplicatedStage(*segment, tuple(workers))]
    (table, network), inner = nested[-1], nested[:-1]
    below = len(workers) // network.count
    begin, end = segment
    units = network.count
    found: list[ReplicatedStage] = []
    while units:
        start, replicas = int(table.begins[units][begin, end]), int(table.replicas[units][begin, end])
        taken = workers[(units - replicas) * below : units * below]
        found = _replicas(inner, (start, end), taken, replicas) + found
        units, end = units - replicas, start
    return found


def _replicas(inner: Levels, segment: tuple[int, int], workers: list[int], replicas: int) -> list[ReplicatedStage]:
    if not inner:
        return [ReplicatedStage(*segment, tuple(workers))]
    size = len(workers) // replicas
    copies = [_trace(inner, segment, workers[at * size : (at + 1) * size]) for at in range(replicas)]
    return [
        ReplicatedStage(same[0].begin, same[0].end, tuple(worker for stage in same for worker in stage.workers))
        for same in zip(*copies, strict=True)
    ]


def network_levels(links: Links, nparts: int) -> list[Network]:
    """Return the network levels: machines of workers where the link table shows them, else one level."""
    if not isinstance(links.latency, tuple) and not isinstance(links.bandwidth, tuple):
        return [Network(nparts, float(links.latency), float(links.bandwidth))]
    for size in range(nparts // 2, 1, -1):
        if nparts % size == 0 and _is_grouped(links, nparts, size):
            inside, between = _worker_pairs(nparts, size)
            return [Network(size, *_mean_link(links, inside)), Network(nparts // size, *_mean_link(links, between))]
    return [Network(nparts, *_mean_link(links, _worker_pairs(nparts, nparts)[0]))]


def _worker_pairs(nparts: int, size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the pairs of workers inside groups of a size, and those between groups."""
    pairs = [(a, b) for a in range(nparts) for b in range(nparts) if a != b]
    return [p for p in pairs if p[0] // size == p[1] // size], [p for p in pairs if p[0] // size != p[1] // size]


def _is_grouped(links: Links, nparts: int, size: int) -> bool:
    """Return whether every link inside groups of a size is faster than every link between groups."""
    inside, between = _worker_pairs(nparts, size)
    return max(links.cost(*pair, _MESSAGE) for pair in inside) < min(links.cost(*pair, _MESSAGE) for pair in between)


def _mean_link(links: Links, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """Return latency and bandwidth from the average cost of links."""
    if not pairs:
        return 0.0, 0.0
    latency = sum(float(links.cost(*pair)) for pair in pairs) / len(pairs)
    more = sum(float(links.cost(*pair, _MESSAGE)) for pair in pairs) / len(pairs) - latency
    return latency, _MESSAGE / more if more > 0 else 0.0
