"""Plan search: the fastest combination of stage layout and schedule within the memory of the workers."""

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

_SHARES = (1.0, 0.8, 0.6)  # of the memory limit: estimates omit a part, so smaller schedules are searched as well
_CHUNKS = 4  # stages per worker for a single micro-batch: only the backward of other stages can overlap


def search_plan(
    graph: Graph,
    profile: Profile,
    request: PlanRequest,
    options: Options,
    *,
    is_bound: bool,
    tail: TailNodes | None = None,
) -> ScheduleChoice:
    """Return the fastest plan; a requested schedule is binding where `is_bound` and the batch has enough samples.

    Where nothing fits into the workers, activations are recomputed in backward. Raises InvalidPlanError where the
    requested schedule still exceeds the memory limit, UnplannableError where every schedule does.
    """
    has_all = options.micro_batches == request.micro_batches  # else the batch has too few samples
    if request.is_from_file or (request.schedule in REPLICATED and is_bound and tail is None):
        try:
            return _check_memory(_choose_fixed_plan(graph, profile, request, options), request)
        except ScheduleError:
            if has_all:
                raise
            request = replace(request, schedule=AUTO)
    costs, rearrange = profile, None
    if tail is not None:
        costs, tail_ms = tail.split_costs(profile)
        rearrange = partial(put_forwards_first, tail_ms=tail_ms)
    try:
        attempts = product((False, True) if tail is None else (False,), _SHARES)
        for recompute, share in attempts if options.workers else ((False, 1.0),):
            limited = _limit_memory(options, share, recompute=recompute)
            layouts = _enumerate_feasible(graph, costs, request, limited, _CHUNKS if not is_bound else 2, tail)
            found = choose_schedule(graph, costs, layouts, limited, request.schedule, rearrange=rearrange)
            if _peak_mb(found) <= (request.memory_limit_mb or math.inf):
                return found
    except ScheduleError as error:
        if request.schedule != AUTO and is_bound and tail is None and has_all:
            raise
        if request.schedule != AUTO:
            return search_plan(graph, profile, replace(request, schedule=AUTO), options, is_bound=is_bound, tail=tail)
        raise UnplannableError(str(error).partition("\n")[0]) from error
    if tail is not None:
        raise UnplannableError("its loss needs all micro-batches at once, and they do not fit into the workers")
    return _check_memory(found, request if is_bound and has_all else replace(request, schedule=AUTO))


def _choose_fixed_plan(graph: Graph, profile: Profile, request: PlanRequest, options: Options) -> ScheduleChoice:
    """Return the choice for a schedule that fixes its layout."""
    if request.schedule in REPLICATED:
        return choose_replicated(graph, profile, options, request.schedule, request.workers)
    path = Path(request.schedule)
    return choose_from_file(
        graph, profile, options, path, nworkers=request.workers, micro_batches=request.micro_batches
    )


def _limit_memory(options: Options, share: float, *, recompute: bool) -> Options:
    """Return options with a share of the memory limit."""
    workers = [
        replace(one, memory_mb=None if one.memory_mb is None else one.memory_mb * share) for one in options.workers
    ]
    return replace(options, workers=tuple(workers), recompute=recompute)


def _peak_mb(choice: ScheduleChoice) -> float:
    return max(worker.memory.total_mb for worker in choice.analysis.workers)


def _enumerate_feasible(  # noqa: PLR0917
    graph: Graph, costs: Profile, request: PlanRequest, options: Options, chunks: int, tail: TailNodes | None
) -> Iterator[Partition]:
    """Yield layouts that fit by the estimate of the partitioner; where none does, all: a schedule may need less."""

    def enumerate_within(options: Options) -> Iterator[Partition]:
        limited = enumerate_layouts(graph, costs, request.workers, request.partitioner, options, most_chunks=chunks)
        if tail is None:
            return limited
        # If transfers cost more than the computation of a small model, a worker may get only the tail.
        options = replace(options, links=FREE)
        free = enumerate_layouts(graph, costs, request.workers, request.partitioner, options, most_chunks=chunks)
        return tail.filter_layouts(limited, free)

    try:
        yield from enumerate_within(options)
    except PartitionError:
        if not options.workers:
            raise
        yield from enumerate_within(replace(options, workers=()))


def _check_memory(choice: ScheduleChoice, request: PlanRequest) -> ScheduleChoice:
    """Return the choice if it is within the memory limit; raises InvalidPlanError or UnplannableError."""
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
