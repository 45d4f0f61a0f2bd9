"""Worker memory: the peak of a worker in a step.

    weights, gradients     during the whole step
    stages                 the peak of their actions in schedule order (`stage_memory`)
    transfers              values stay with their sender until the reader has acknowledged them
    libraries              fragmentation of the heap (`malloc_model`), and memory that libraries retain

A worker does not return memory to the system, so the peaks of these parts add up.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gemini.partition.analysis.analysis_result import Analysis
from gemini.partition.assignment import Partition
from gemini.planner.malloc_model import HeapModel
from gemini.planner.stage_memory import StageMemories, StageMemory
from gemini.profiling.measured_device import MB
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Block
from gemini.schedule.schedplan import SchedPlan

_STEPS = 3  # until the heap has reached its steady state
_HEAPS = 4  # simulated heaps of a plan: the largest counts, as it must be within the limit
_CHANGES = 100_000  # simulated allocations and releases: of many, fewer heaps are simulated, which differ less


def add_worker_memory(analysis: Analysis, partition: Partition, memories: StageMemories) -> Analysis:
    """Return the analysis with the predicted memory of each worker."""
    if analysis.plan is None:
        return analysis
    stages = [memories.of(partition, at) for at in range(partition.nstages)]
    transfers = _Transfers(analysis, analysis.plan, partition.workers, memories.size_ratio / analysis.micro_batches)
    workers = []
    for one in analysis.workers:
        nodes = [node for stage in one.stages for node in partition.stages[stage]]
        held, most, gaps = _simulate_heap(analysis.plan.device_blocks(one.worker), stages)
        memory = replace(
            one.memory, activations_mb=held, working_mb=most - held, transfers_mb=transfers.of(one.worker, stages),
            libraries_mb=gaps + memories.libraries(nodes),
        )  # fmt: skip
        workers.append(replace(one, memory=memory))
    return replace(analysis, workers=tuple(workers))


def _simulate_heap(blocks: Sequence[Block], stages: Sequence[StageMemory]) -> tuple[float, float, float]:
    """Return the memory in use when the largest action begins, the peak, and the fragmentation at the peak (MB)."""
    changes = _STEPS * sum(len(getattr(stages[block.stage or 0], block.btype)) for block in blocks)
    heaps = max(1, min(_HEAPS, _CHANGES // max(1, changes)))
    return max((_replay(blocks, stages, seed) for seed in range(heaps)), key=lambda found: found[-1])


def _replay(blocks: Sequence[Block], stages: Sequence[StageMemory], seed: int) -> tuple[float, float, float]:
    with_backward = {block.stage for block in blocks if block.btype != FORWARD}
    heap, held, most = HeapModel(seed), 0, 0
    for _ in range(_STEPS):
        for block in blocks:
            stage, before = block.stage or 0, heap.live
            heap.most_live = 0
            for key, mb in getattr(stages[stage], block.btype):
                if mb > 0:
                    heap.allocate((stage, block.mid, key), mb)
                else:
                    heap.free((stage, block.mid, key))
            if heap.most_live > most:
                held, most = before, heap.most_live
            if block.stage not in with_backward:  # nothing is retained without a backward
                for key, _ in stages[stage].forward:
                    heap.free((stage, block.mid, key))
    return held / MB, most / MB, (heap.most - most) / MB


class _Transfers:
    """Transfers between workers: shared memory that the sender allocates and both map."""

    def __init__(self, analysis: Analysis, plan: SchedPlan, workers: Sequence[int], scale: float) -> None:
        self.analysis, self.workers = analysis, workers
        self.scale = scale  # sizes in the graph → sizes of a micro-batch
        self.ends = {(block.stage or 0, block.btype, block.mid): float(plan.step(block) + block.span) for block in plan}

    def of(self, worker: int, stages: Sequence[StageMemory]) -> float:
        """Return the sum of the peaks of all links of a worker, per direction."""
        return sum(
            _peak(self._events(source, target, stages))
            for source in range(self.analysis.nparts)
            for target in range(self.analysis.nparts)
            if source != target and worker in (source, target)
        )

    def _events(self, source: int, target: int, stages: Sequence[StageMemory]) -> list[tuple[float, float]]:
        """Return the times of allocation and release on a link, with the size."""
        notices = sorted(sent for sent, _, _ in self._messages(target, source, stages))
        events = []
        for sent, done, mb in self._messages(source, target, stages):
            at = bisect_right(notices, done)  # acknowledged with the next message in the other direction
            events += [(sent, mb), (notices[at] if at < len(notices) else math.inf, -mb)]
        return events

    def _messages(
        self, source: int, target: int, stages: Sequence[StageMemory]
    ) -> Iterator[tuple[float, float, float]]:
        """Yield (send time, time of last use, MB) of every message from one worker to another."""
        for flow, mid in itertools.product(self.analysis.flows, range(self.analysis.micro_batches)):
            ends = self.workers[flow.source], self.workers[flow.target]
            if flow.forward_mb and ends == (source, target):
                sent = self.ends.get((flow.source, FORWARD, mid), math.inf)
                yield (
                    sent,
                    self._last_use(flow.target, mid, stages[flow.target].holds_inputs),
                    flow.forward_mb * self.scale,
                )
            if flow.backward_mb and ends == (target, source):
                sent, done = self._last_use(flow.target, mid), self._last_use(flow.source, mid)
                yield sent, done, flow.backward_mb * self.scale

    def _last_use(self, stage: int, mid: int, until_weights: bool = False) -> float:
        """Return when a stage no longer needs its inputs: after its backward, or after its weight gradients."""
        order = (WEIGHT_GRADIENT,) if until_weights else ()
        for btype in (*order, INPUT_GRADIENT, BACKWARD, FORWARD):
            if (stage, btype, mid) in self.ends:
                return self.ends[stage, btype, mid]
        return math.inf


def _peak(events: list[tuple[float, float]]) -> float:
    """Return the peak of allocated memory; at equal times, allocations precede releases."""
    held = most = 0.0
    for _, mb in sorted(events, key=lambda event: (event[0], -event[1])):
        held += mb
        most = max(most, held)
    return most
