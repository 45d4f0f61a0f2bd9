"""Straight pipes: one worker a stage. The bottleneck is the slowest stage or the slowest cut, since PipeDream sends
while it computes.

A(stages, end) = min over begin of max( A(stages − 1, begin), cut(begin), time(begin, end) )
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemini.partition.exact.prefix_costs import Floats
from gemini.partition.partition_problem import in_flight
from gemini.partition.pipedream.merged_items import Row


def straight(row: Row, workers: Sequence[int]) -> tuple[float, list[int]] | None:
    """The least bottleneck (ms), and where stages end; stage by stage the workers given. None where nothing fits."""
    best = np.full(row.size + 1, np.inf)
    best[0] = 0.0
    origins = []
    for stage, worker in enumerate(workers):
        arriving = best if stage == 0 else np.maximum(best, _cut(row, workers[stage - 1], worker))
        table = np.maximum(arriving[:, None], _times(row, stage, workers))
        origins.append(table.argmin(axis=0))
        best = table.min(axis=0)
    if not np.isfinite(best[row.size]):
        return None
    ends = [row.size]
    for origin in reversed(origins[1:]):
        ends.append(int(origin[ends[-1]]))
    return float(best[row.size]), ends[::-1]


def _times(row: Row, stage: int, workers: Sequence[int]) -> Floats:
    problem, worker = row.problem, workers[stage]
    who = problem.workers[worker]
    times = row.work / who.speed
    if who.memory_mb is not None:
        flying = in_flight(stage, len(workers), problem.options.micro_batches)
        times = np.where(row.memory(flying) <= who.memory_mb * (1 + 1e-9), times, np.inf)
    foreign = [pin is not None and pin != worker for pin in (item.pin for item in problem.items)]
    if any(foreign):
        before = np.concatenate(([0], np.cumsum(foreign)))
        times = np.where(before[None, :] > before[:, None], np.inf, times)
    return times


def _cut(row: Row, source: int, target: int) -> Floats:
    """The time of what crosses each cut, all micro-batches."""
    links, batches = row.problem.options.links, row.problem.options.micro_batches
    messages, size = row.crossing
    if links.free or source == target:
        return np.zeros(row.size + 1)
    latency = float(links.cost(source, target))
    byte = float(links.cost(source, target, 1 << 20)) - latency  # of a MB
    return messages * latency * batches + size * byte
