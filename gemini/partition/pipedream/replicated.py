"""Replicated pipes: a stage may have several workers, which share its micro-batches and sum its gradients after each
batch.

A replicated stage of r workers takes 1/r of the time, and an all-reduce of its gradients around the ring of them. The
network may have levels (workers of a machine, machines): a stage of the outer level is a whole pipe of the inner one.

    outer    ├───── 2 machines ─────┼── 1 machine ──┤
    inner    ├─ 3 workers ─┼─ 1 ────┤   …

Workers count as equally fast: as fast as they are on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemini.partition.exact.prefix_costs import Floats, Ints
from gemini.partition.pipedream.merged_items import Row
from gemini.schedule.link_costs import Links

_MESSAGE = 1 << 20  # bytes


@dataclass(frozen=True)
class Network:
    """One level: how many of the level below, and what connects them (ms, bytes a ms)."""

    count: int
    latency: float
    bandwidth: float  # 0: size does not matter

    def transfer(self, messages: Floats, mb: Floats) -> Floats:
        """The time of messages of together some MB."""
        return messages * self.latency + (mb * (1 << 20) / self.bandwidth if self.bandwidth else 0.0)

    def reduction(self, mb: Floats, replicas: int) -> Floats:
        """The time to sum gradients around a ring."""
        rounds = 2 * (replicas - 1)
        return np.where(mb > 0, self.transfer(np.full_like(mb, rounds), mb * rounds / replicas), 0.0)


@dataclass(frozen=True)
class Stage:
    """A stretch of the row and its workers."""

    begin: int
    end: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class _Table:
    """The best time of every stretch for each number of units, and the last stage of that pipe."""

    times: list[Floats]
    begins: list[Ints]
    replicas: list[Ints]


Levels = list[tuple[_Table, Network]]  # the innermost first


def replicated(row: Row) -> tuple[float, list[Stage]]:
    """The least time of a batch's slowest stage (ms), and the stages."""
    problem = row.problem
    networks = levels(problem.options.links, problem.nparts)
    speed = sum(worker.speed for worker in problem.workers) / problem.nparts
    unit = row.work / speed
    tables = []
    for network in networks:
        tables.append(_solve(row, unit, network))
        unit = tables[-1].times[network.count]
    stages = _trace(list(zip(tables, networks, strict=True)), (0, row.size), list(range(problem.nparts)))
    return float(tables[-1].times[networks[-1].count][0, row.size]), stages


def _solve(row: Row, unit: Floats, network: Network) -> _Table:
    """Pipes of 1 … count units over every stretch."""
    messages, size = row.crossing
    crossing = network.transfer(messages * row.problem.options.micro_batches, size)
    alone = [unit / r + network.reduction(row.gradients_mb, r) for r in range(1, network.count + 1)]
    rows = np.arange(row.size + 1)
    table = _Table([unit], [np.repeat(rows[:, None], row.size + 1, 1)], [np.zeros(unit.shape, dtype=np.int64)])
    for units in range(1, network.count + 1):
        times, begins = alone[units - 1].copy(), np.repeat(rows[:, None], row.size + 1, 1)
        chosen = np.full(times.shape, units, dtype=np.int64)
        for last in range(1, units):
            arriving = np.maximum(table.times[units - last], crossing[None, :])
            for begin in range(1, row.size):  # where the last stage begins
                found = np.maximum(arriving[:, begin, None], alone[last - 1][begin][None, :])
                better = found < times * (1 - 1e-9)
                times[better] = found[better]
                begins[better] = begin
                chosen[better] = last
        table.times.append(times)
        table.begins.append(begins)
        table.replicas.append(chosen)
    return table


def _trace(nested: Levels, stretch: tuple[int, int], workers: list[int]) -> list[Stage]:
    """The stages of a stretch on workers; replicas of an inner pipe are alike, so their workers are put together."""
    if not nested:
        return [Stage(*stretch, tuple(workers))]
    (table, network), inner = nested[-1], nested[:-1]
    below = len(workers) // network.count
    begin, end = stretch
    units = network.count
    found: list[Stage] = []
    while units:
        start, replicas = int(table.begins[units][begin, end]), int(table.replicas[units][begin, end])
        taken = workers[(units - replicas) * below : units * below]
        found = _replicas(inner, (start, end), taken, replicas) + found
        units, end = units - replicas, start
    return found


def _replicas(inner: Levels, stretch: tuple[int, int], workers: list[int], replicas: int) -> list[Stage]:
    if not inner:
        return [Stage(*stretch, tuple(workers))]
    size = len(workers) // replicas
    copies = [_trace(inner, stretch, workers[at * size : (at + 1) * size]) for at in range(replicas)]
    return [
        Stage(same[0].begin, same[0].end, tuple(worker for stage in same for worker in stage.workers))
        for same in zip(*copies, strict=True)
    ]


def levels(links: Links, nparts: int) -> list[Network]:
    """The levels of a network: machines of workers where the table of links shows them, else one level."""
    if not isinstance(links.latency, tuple) and not isinstance(links.bandwidth, tuple):
        return [Network(nparts, float(links.latency), float(links.bandwidth))]
    for size in range(nparts // 2, 1, -1):
        if nparts % size == 0 and _is_grouped(links, nparts, size):
            inside, between = _pairs(nparts, size)
            return [Network(size, *_mean(links, inside)), Network(nparts // size, *_mean(links, between))]
    return [Network(nparts, *_mean(links, _pairs(nparts, nparts)[0]))]


def _pairs(nparts: int, size: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of workers inside groups of a size, and between them."""
    pairs = [(a, b) for a in range(nparts) for b in range(nparts) if a != b]
    return [p for p in pairs if p[0] // size == p[1] // size], [p for p in pairs if p[0] // size != p[1] // size]


def _is_grouped(links: Links, nparts: int, size: int) -> bool:
    """Whether every link inside groups of a size is faster than every link between them."""
    inside, between = _pairs(nparts, size)
    return max(links.cost(*pair, _MESSAGE) for pair in inside) < min(links.cost(*pair, _MESSAGE) for pair in between)


def _mean(links: Links, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """Latency and bandwidth of links, on average of what they cost."""
    if not pairs:
        return 0.0, 0.0
    latency = sum(float(links.cost(*pair)) for pair in pairs) / len(pairs)
    more = sum(float(links.cost(*pair, _MESSAGE)) for pair in pairs) / len(pairs) - latency
    return latency, _MESSAGE / more if more > 0 else 0.0
