"""The memory of a worker in a step: what its stages hold, action by action, and what is on the way between workers.

    weights, gradients     as long as the step
    stages                 the most that is held and taken at once, in the planned order (`stage_memory`)
    transfers              values lie where their sender has put them until their reader is done and has said so
    libraries              what the heap has in gaps (`heap`), and what libraries keep for themselves

Memory that a worker has had stays with it, in each of these for itself, so their peaks add up.
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

_STEPS = 3  # until the heap has found its shape
_HEAPS = 4  # heaps that one plan may have: the largest counts, as a limit has to hold


def add_worker_memory(analysis: Analysis, partition: Partition, known: StageMemories) -> Analysis:
    """The analysis, with the memory of workers as they will have it."""
    if analysis.plan is None:
        return analysis
    stages = [known.of(partition, at) for at in range(partition.nstages)]
    transfers = _Transfers(analysis, analysis.plan, partition.workers, known.pieces / analysis.micro_batches)
    workers = []
    for one in analysis.workers:
        nodes = [node for stage in one.stages for node in partition.stages[stage]]
        held, most, gaps = _simulate_heap(analysis.plan.device_blocks(one.worker), stages)
        memory = replace(
            one.memory, activations_mb=held, working_mb=most - held, transfers_mb=transfers.of(one.worker, stages),
            libraries_mb=gaps + known.libraries(nodes),
        )  # fmt: skip
        workers.append(replace(one, memory=memory))
    return replace(analysis, workers=tuple(workers))


def _simulate_heap(blocks: Sequence[Block], stages: Sequence[StageMemory]) -> tuple[float, float, float]:
    """What is held when the action that takes the most begins, the most, and what lies idle in the heap then (MB)."""
    return max((_replay(blocks, stages, seed) for seed in range(_HEAPS)), key=lambda found: found[-1])


def _replay(blocks: Sequence[Block], stages: Sequence[StageMemory], seed: int) -> tuple[float, float, float]:
    learning = {block.stage for block in blocks if block.btype != FORWARD}
    heap, held, most = HeapModel(seed), 0, 0
    for _ in range(_STEPS):
        for block in blocks:
            stage, before = block.stage or 0, heap.live
            heap.most_live = 0
            for key, mb in getattr(stages[stage], block.btype):
                if mb > 0:
                    heap.take((stage, block.mid, key), mb)
                else:
                    heap.give((stage, block.mid, key))
            if heap.most_live > most:
                held, most = before, heap.most_live
            if block.stage not in learning:  # nothing is kept for a backward that does not come
                for key, _ in stages[stage].forward:
                    heap.give((stage, block.mid, key))
    return held / MB, most / MB, (heap.most - most) / MB


class _Transfers:
    """What crosses between workers: slabs of memory that the sender takes, and that both have mapped."""

    def __init__(self, analysis: Analysis, plan: SchedPlan, workers: Sequence[int], scale: float) -> None:
        self.analysis, self.workers = analysis, workers
        self.scale = scale  # from sizes of the graph to those of a micro-batch
        self.ends = {(block.stage or 0, block.btype, block.mid): float(plan.step(block) + block.span) for block in plan}

    def of(self, worker: int, stages: Sequence[StageMemory]) -> float:
        """At the most, on all links of a worker, each direction for itself."""
        return sum(
            _peak(self._events(source, target, stages))
            for source in range(self.analysis.nparts)
            for target in range(self.analysis.nparts)
            if source != target and worker in (source, target)
        )

    def _events(self, source: int, target: int, stages: Sequence[StageMemory]) -> list[tuple[float, float]]:
        """When memory is taken for what goes from one worker to another, and when it is free again, with how much."""
        notices = sorted(sent for sent, _, _ in self._messages(target, source, stages))
        events = []
        for sent, done, mb in self._messages(source, target, stages):
            at = bisect_right(notices, done)  # told with the next message that goes the other way
            events += [(sent, mb), (notices[at] if at < len(notices) else math.inf, -mb)]
        return events

    def _messages(
        self, source: int, target: int, stages: Sequence[StageMemory]
    ) -> Iterator[tuple[float, float, float]]:
        """(sent, done with, MB) of every message from one worker to another."""
        for flow, mid in itertools.product(self.analysis.flows, range(self.analysis.micro_batches)):
            ends = self.workers[flow.source], self.workers[flow.target]
            if flow.forward_mb and ends == (source, target):
                sent = self.ends.get((flow.source, FORWARD, mid), math.inf)
                yield sent, self._read(flow.target, mid, stages[flow.target].holds_inputs), flow.forward_mb * self.scale
            if flow.backward_mb and ends == (target, source):
                sent, done = self._read(flow.target, mid), self._read(flow.source, mid)
                yield sent, done, flow.backward_mb * self.scale

    def _read(self, stage: int, mid: int, until_weights: bool = False) -> float:
        """When a stage is through with what it was given: after its backward, or after that of its weights."""
        order = (WEIGHT_GRADIENT,) if until_weights else ()
        for btype in (*order, INPUT_GRADIENT, BACKWARD, FORWARD):
            if (stage, btype, mid) in self.ends:
                return self.ends[stage, btype, mid]
        return math.inf


def _peak(events: list[tuple[float, float]]) -> float:
    """The most that is taken at once; what is freed at the same moment is not yet free."""
    held = most = 0.0
    for _, mb in sorted(events, key=lambda event: (event[0], -event[1])):
        held += mb
        most = max(most, held)
    return most
