"""Replicated plans: copies of the model that each take a part of every batch (data parallelism).

    workers 0 … k-1      replica 0: micro-batches 0, N, 2N …        one plan for k workers and an N-th of the batch,
    workers k … 2k-1     replica 1: micro-batches 1, N+1, …         N times

A step by such a plan is one step of the whole batch: denominators and random numbers are those of the whole batch, and
the gradients of the replicas are summed. A batch with fewer samples than micro-batches uses fewer replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gemini.partition.analysis.analysis_result import Analysis
from gemini.planner.schedule_choice import ScheduleChoice
from gemini.planner.step_plan import UnplannableError
from gemini.schedule.block import Block
from gemini.schedule.schedplan import SchedPlan


def count_replicas(wanted: int, micro_batches: int) -> int:
    """Return how many replicas share so many micro-batches evenly; raises UnplannableError where only one does."""
    found = max(count for count in range(1, wanted + 1) if micro_batches % count == 0)
    if found < 2:
        raise UnplannableError(f"{micro_batches} micro-batches cannot be shared evenly by up to {wanted} replicas")
    return found


def choose_with_replicas(count: int, search: Callable[[], ScheduleChoice]) -> ScheduleChoice:
    """Return the choice of `search`, which is for one replica, with so many of them."""
    one = search()
    nworkers = one.plan.ndevs
    made = replace(one.partition, nparts=nworkers * count)
    plan = replicate(one.plan, count)
    return replace(one, partition=made, plan=plan, analysis=_replicate_analysis(one.analysis, plan, count, nworkers))


def replicate(plan: SchedPlan, count: int) -> SchedPlan:
    """Return a schedule next to itself, on further workers: stage s of replica r is stage r · n + s.

    n counts the stages of the schedule, which may have replicas of its own (Chimera).
    """
    found, nstages = SchedPlan(plan.ndevs * count), 1 + max((block.stage or 0 for block in plan), default=0)
    for replica in range(count):
        twins: dict[Block, Block] = {}
        for block in plan:
            stage = (block.stage or 0) + replica * nstages
            twin = twins[block] = Block(block.mid, block.span, block.memory, block.btype, stage=stage)
            found.add_block(twin, [device + replica * plan.ndevs for device in plan.device(block)], plan.step(block))
        for block, twin in twins.items():
            for previous in block.before:
                Block.make_dependency(twins[previous], twin)
    return found


def _replicate_analysis(analysis: Analysis, plan: SchedPlan, count: int, nworkers: int) -> Analysis:
    workers = tuple(
        replace(one, worker=one.worker + replica * nworkers) for replica in range(count) for one in analysis.workers
    )
    batches = analysis.micro_batches * count
    return replace(analysis, workers=workers, plan=plan, micro_batches=batches)
