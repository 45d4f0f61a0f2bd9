"""Straight pipelines: one worker per stage. The bottleneck is the slowest stage or the slowest cut, since PipeDream
overlaps transfers with compute.

A(stages, end) = min over begin of max( A(stages − 1, begin), cut(begin), time(begin, end) )
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemini.partition.exact.prefix_costs import Floats
from gemini.partition.partition_problem import in_flight
from gemini.partition.pipedream.merged_items import MergedItems


def find_straight(items: MergedItems, workers: Sequence[int]) -> tuple[float, list[int]] | None:
    """Return the least bottleneck (ms) and the stage ends, given the worker of each stage; None where nothing fits."""
    best = np.full(items.size + 1, np.inf)
    best[0] = 0.0
    origins = []
    for stage, worker in enumerate(workers):
        arriving = best if stage == 0 else np.maximum(best, _cut_times(items, workers[stage - 1], worker))
        table = np.maximum(arriving[:, None], _stage_times(items, stage, workers))
        origins.append(table.argmin(axis=0))
        best = table.min(axis=0)
    if not np.isfinite(best[items.size]):
        return None
    ends = [items.size]
    for origin in reversed(origins[1:]):
        ends.append(int(origin[ends[-1]]))
    return float(best[items.size]), ends[::-1]


def _stage_times(items: MergedItems, stage: int, workers: Sequence[int]) -> Floats:
    problem, worker = items.problem, workers[stage]
    spec = problem.workers[worker]
    times = items.work / spec.speed
    if spec.memory_mb is not None:
        flying = in_flight(stage, len(workers), problem.options.micro_batches)
        times = np.where(items.memory(flying) <= spec.memory_mb * (1 + 1e-9), times, np.inf)
    foreign = [pin is not None and pin != worker for pin in (item.pin for item in problem.items)]
    if any(foreign):
        before = np.concatenate(([0], np.cumsum(foreign)))
        times = np.where(before[None, :] > before[:, None], np.inf, times)
    return times


def _cut_times(items: MergedItems, source: int, target: int) -> Floats:
    """Return the transfer time of each cut, all micro-batches."""
    links, batches = items.problem.options.links, items.problem.options.micro_batches
    messages, size = items.crossing
    if links.free or source == target:
        return np.zeros(items.size + 1)
    latency = float(links.cost(source, target))
    byte = float(links.cost(source, target, 1 << 20)) - latency  # per MB
    return messages * latency * batches + size * byte
