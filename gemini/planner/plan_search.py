"""Choosing: of all layouts and schedules, the one that a step will run by, within the memory of the workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from gemini.errors import InvalidPlanError, PartitionError, ScheduleError
from gemini.ir.graph import Graph
from gemini.partition.assignment import Partition
from gemini.partition.partition_options import Options
from gemini.planner.plan_request import PlanRequest
from gemini.planner.schedule_choice import AUTO, REPLICATED, ScheduleChoice, choose_schedule
from gemini.planner.stage_layouts import enumerate_layouts
from gemini.planner.step_plan import UnplannableError
from gemini.planner.tail_plan import TailNodes, put_forwards_first
from gemini.planner.user_schedules import choose_from_file, choose_replicated
from gemini.profiling.profile_result import Profile
from gemini.schedule.link_costs import FREE

_SHARES = (1.0, 0.8, 0.6)  # of the memory, for what estimates leave out: schedules that take less are searched for then
_CHUNKS = 4  # stages a worker where a batch is one micro-batch: only other stages' backward can be overlapped then


def search_plan(
    graph: Graph,
    profile: Profile,
    request: PlanRequest,
    options: Options,
    *,
    is_bound: bool,
    tail: TailNodes | None = None,
) -> ScheduleChoice:
    """The fastest; by the schedule that was asked for, which need not be where the batch is one micro-batch, or has
    fewer samples than micro-batches were asked for.

    Where nothing fits into the workers, activations are computed again in backward. Raises InvalidPlanError where what
    was asked for takes more memory even so, and UnplannableError where everything does.
    """
    is_whole = options.micro_batches == request.micro_batches  # else the batch has fewer samples
    if request.is_from_file or (request.schedule in REPLICATED and is_bound and tail is None):
        try:
            return _check_memory(_choose_fixed_plan(graph, profile, request, options), request)
        except ScheduleError:
            if is_whole:
                raise
            request = replace(request, schedule=AUTO)
    costs, arranged = profile, None
    if tail is not None:
        costs, tail_ms = tail.split_costs(profile)
        arranged = partial(put_forwards_first, tail_ms=tail_ms)
    try:
        ways = product((False, True) if tail is None else (False,), _SHARES)
        for again, share in ways if options.workers else ((False, 1.0),):
            limited = _limit_memory(options, share, recompute=again)
            laid = _enumerate_feasible(graph, costs, request, limited, _CHUNKS if not is_bound else 2, tail)
            found = choose_schedule(graph, costs, laid, limited, request.schedule, arranged=arranged)
            if _peak_mb(found) <= (request.memory_limit_mb or math.inf):
                return found
    except ScheduleError as error:
        if request.schedule != AUTO and is_bound and tail is None and is_whole:
            raise
        if request.schedule != AUTO:
            return search_plan(graph, profile, replace(request, schedule=AUTO), options, is_bound=is_bound, tail=tail)
        raise UnplannableError(str(error).partition("\n")[0]) from error
    if tail is not None:
        raise UnplannableError("all micro-batches at once, as its loss needs them, do not fit into the workers")
    return _check_memory(found, request if is_bound and is_whole else replace(request, schedule=AUTO))


def _choose_fixed_plan(graph: Graph, profile: Profile, request: PlanRequest, options: Options) -> ScheduleChoice:
    """By a plan that is laid out already."""
    if request.schedule in REPLICATED:
        return choose_replicated(graph, profile, options, request.schedule, request.workers)
    path = Path(request.schedule)
    return choose_from_file(
        graph, profile, options, path, nworkers=request.workers, micro_batches=request.micro_batches
    )


def _limit_memory(options: Options, share: float, *, recompute: bool) -> Options:
    """With a share of the memory, and activations that are kept or computed again in backward."""
    workers = [
        replace(one, memory_mb=None if one.memory_mb is None else one.memory_mb * share) for one in options.workers
    ]
    return replace(options, workers=tuple(workers), recompute=recompute)


def _peak_mb(choice: ScheduleChoice) -> float:
    return max(worker.memory.total_mb for worker in choice.analysis.workers)


def _enumerate_feasible(  # noqa: PLR0917
    graph: Graph, costs: Profile, request: PlanRequest, options: Options, chunks: int, tail: TailNodes | None
) -> Iterator[Partition]:
    """Layouts that fit by the partitioners' estimate; where none does, all: a schedule may take less than that."""

    def found(options: Options) -> Iterator[Partition]:
        made = enumerate_layouts(graph, costs, request.workers, request.partitioner, options, most_chunks=chunks)
        if tail is None:
            return made
        # Where links cost more than a small model computes, only the tail may be left to a worker.
        options = replace(options, links=FREE)
        free = enumerate_layouts(graph, costs, request.workers, request.partitioner, options, most_chunks=chunks)
        return tail.filter_layouts(made, free)

    try:
        yield from found(options)
    except PartitionError:
        if not options.workers:
            raise
        yield from found(replace(options, workers=()))


def _check_memory(choice: ScheduleChoice, request: PlanRequest) -> ScheduleChoice:
    """A choice that is within the memory of the workers."""
    if request.memory_limit_mb is None or _peak_mb(choice) <= request.memory_limit_mb:
        return choice
    worker = max(choice.analysis.workers, key=lambda one: one.memory.total_mb)
    limit_mb = request.memory_limit_mb
    needs = f"needs {worker.memory.total_mb:.1f} MB in worker {worker.worker}, memory_limit is {limit_mb:.1f} MB"
    if request.schedule == AUTO:
        raise UnplannableError(f"it does not fit into the workers: at best it {needs}")
    raise InvalidPlanError(
        f"{choice.name} with {choice.analysis.micro_batches} micro-batches {needs}\n"
        "    → schedule='auto' takes the fastest that fits; more workers, or a larger memory_limit"
    )
