"""Step planner: model + batch + PlanRequest → StepPlan.

    find_batch_dims ─► prove_micro_batch ─► profile ─► search_plan ─► generate ─► record side effects
      sample dims      capture + proof      costs      partition,     stages      buffers, random numbers
                                                       schedule

Every step processes one micro-batch, on as many threads as a worker has. A batch that cannot
be split is planned with a tail on the whole batch, else as a single micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batchnorm import uses_batch_statistics
from gemini.batch_analysis.precompute import random_guards
from gemini.cache.plans import CachedPlan, graph_key, load_or_build, store
from gemini.cache_files import cache_folder
from gemini.capture.batch_dim import BatchLayout
from gemini.ir.graph import Graph
from gemini.parallel_program.program_files import StepFacts
from gemini.planner.buffer_writes import check_attribute_writes, find_written_buffers
from gemini.planner.checkpoint_costs import add_recomputation
from gemini.planner.contention import Contention
from gemini.planner.microbatch_capture import MicroBatch, prove_micro_batch
from gemini.planner.microbatch_split import find_batch_dims
from gemini.planner.plan_request import PlanRequest
from gemini.planner.plan_reuse import find_equivalent_plan
from gemini.planner.plan_search import search_plan
from gemini.planner.planning_progress import begin_phase, planning_progress
from gemini.planner.planning_time import CallCount, check_deadline, check_planning_time
from gemini.planner.preconditions import check_graph_attributes, check_model
from gemini.planner.replan import apply_measured_times
from gemini.planner.replicated_plan import choose_with_replicas, count_replicas
from gemini.planner.rng_analysis import check_host_rng, record_stage_rng
from gemini.planner.schedule_choice import ScheduleChoice
from gemini.planner.shard_stages import divide_stages
from gemini.planner.single_microbatch import capture_whole_batch, find_whole_batch_branches, record_whole_batch_rng
from gemini.planner.step_plan import ONE_MICRO_BATCH, CoupledSamplesError, StepPlan, UnplannableError
from gemini.planner.tail_plan import TailNodes, build_tail, check_stage_backward, couples_late, find_tail_nodes
from gemini.planner.user_schedules import check_backward_blocks
from gemini.profiling.measured_device import MB
from gemini.profiling.profile_result import Profile
from gemini.quiet_warnings import mute_warnings
from gemini.schedule.user_plan import replicas

_MIN_MS = 1e-6
_SUMMED_MB_PER_MS = 4.0  # gradients of replicas, which the controller sums
_MIN_GAIN = 0.05  # of a step: a new plan replaces a running one only if it is shorter by this


def plan_step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    """Return the plan for calls like this one; raises UnplannableError, or a GeminiError for a faulty request."""
    check_model(model)
    progress = planning_progress(type(model).__name__, request.quiet)
    with mute_warnings(), progress:  # the calls themselves will emit these warnings
        if request.measured_plan is not None:
            return _replan(request.measured_plan, args, kwargs, request)
        return _plan(model, args, kwargs, request)


def _plan(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    with CallCount(model).count() as calls:
        batch = find_batch_dims(model, args, kwargs)
    check_planning_time(model, calls.per_run, request)
    begin_phase("capture")
    reason = request.single_micro_batch_reason
    if not reason and request.micro_batches == 1:
        reason = ONE_MICRO_BATCH
    if not reason:
        try:
            return _plan_micro_batches(model, args, kwargs, batch, request)
        except UnplannableError as error:
            if request.current_branch or request.is_from_file:
                raise
            reason = f"{request.gather_reason}; {error}" if request.gather_reason else str(error)
            if isinstance(error, CoupledSamplesError):
                found = _plan_with_tail(model, args, kwargs, batch, request, reason)
                if found is not None:
                    return found
    try:
        micro_batch, batch = capture_whole_batch(model, args, kwargs, batch, request)
        return _build_plan(micro_batch, batch, reason, args, kwargs, request)
    except UnplannableError as error:
        if reason == ONE_MICRO_BATCH:
            raise
        text = reason if str(error) in reason else f"{reason}; and as a single micro-batch: {error}"
        raise UnplannableError(text) from error


def _plan_with_tail(  # noqa: PLR0917
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: BatchLayout | None,
    request: PlanRequest,
    reason: str,
) -> StepPlan | None:
    """Plan a model whose end couples samples; None where that is not possible or was requested already."""
    if request.gather_reason or not couples_late(model):
        return None
    try:
        return _plan_micro_batches(model, args, kwargs, batch, replace(request, gather_reason=reason))
    except UnplannableError:
        return None


def _plan_micro_batches(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout | None, request: PlanRequest
) -> StepPlan:
    if not request.gather_reason:
        _check_batch_statistics(model, request)
    if batch is None:
        raise UnplannableError("none of its inputs counts samples")
    if batch.size < 2:
        raise UnplannableError("there is only one sample")
    micro_batch = prove_micro_batch(model, args, kwargs, batch, request)
    if not request.gather_reason:
        return _build_plan(micro_batch, batch, "", args, kwargs, request)
    if request.is_from_file:
        raise UnplannableError("the loss compares samples, and the schedule of a file does not wait for all of them")
    tail = find_tail_nodes(micro_batch.forms, request.gather_reason)
    return _build_plan(micro_batch, batch, "", args, kwargs, request, tail)


def _check_batch_statistics(model: nn.Module, request: PlanRequest) -> None:
    """Refuse batch normalization in training before the capture, which would not change the result."""
    found = [name for name, module in model.named_modules() if uses_batch_statistics(module)]
    if found and not request.micro_batch_statistics:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise CoupledSamplesError(
            f"batch normalization in training ({found[0]}{more}) takes statistics over the batch; "
            "batch_norm='micro-batch' takes them per micro-batch"
        )


# ── from a captured micro-batch to a plan ──────────────────────────────────────────────────────────────────────────
def _build_plan(  # noqa: PLR0917
    micro_batch: MicroBatch, batch: BatchLayout, single_reason: str, args: tuple[Any, ...], kwargs: dict[str, Any],
    request: PlanRequest, tail: TailNodes | None = None,
) -> StepPlan:  # fmt: skip
    """Plan the step of a captured micro-batch; `single_reason` is why it is the whole batch."""
    graph, count = micro_batch.graph, len(micro_batch.sizes)
    if request.replicas > 1 and (single_reason or tail is not None):
        raise UnplannableError(f"{request.replicas} replicas need a batch that can be split")
    check_graph_attributes(graph)
    check_host_rng(graph)
    check_attribute_writes(graph, micro_batch.forms, single_reason)
    compiled = _find_compiled(micro_batch, request, tail)
    similar = find_equivalent_plan(request, graph, count) if compiled is None else None
    if similar is not None and similar[0].tail == tail:
        plan = _adapt_plan(*similar, micro_batch, batch)
    else:
        known = similar[0].profile if similar is not None and similar[1] == 1 else None
        found, is_cached = compiled or _load_or_search(micro_batch, known, request, tail, is_bound=not single_reason)
        plan = StepPlan(
            graph, found.profile, found.partition, found.analysis, found.schedule, found.analysis.schedule, count,
            batch, micro_batch.forms, (), tail=tail, captured_parts=micro_batch.parts, recompute=found.recompute,
            is_cached=is_cached, program=request.program,
        )  # fmt: skip
        if request.is_from_file and torch.is_grad_enabled():
            check_backward_blocks(plan)
        if tail is not None:
            build_tail(plan, plan.build())
            check_stage_backward(plan, plan.build())
    return _add_side_effects(replace(plan, single_micro_batch_reason=single_reason), args, kwargs, request)


def _adapt_plan(earlier: StepPlan, ratio: float, micro_batch: MicroBatch, batch: BatchLayout) -> StepPlan:
    """Return the plan of an equivalent graph for another input size, with `ratio` times its work."""
    return replace(
        earlier,
        graph=micro_batch.graph,
        analysis=replace(earlier.analysis, step_ms=earlier.step_ms * ratio),
        batch=batch,
        forms=micro_batch.forms,
        rng_patterns=(),
        buffers_written_once=(),
        branches=None,
        captured_parts=micro_batch.parts,
        measured=None,
        shards=None,
        _built={},
    )


def _find_compiled(
    micro_batch: MicroBatch, request: PlanRequest, tail: TailNodes | None
) -> tuple[CachedPlan, bool] | None:
    """Return the plan of a compiled program for a call; None where there is none."""
    if request.program is None:
        return None
    found = request.program.find(micro_batch.graph, step_facts(micro_batch.graph, len(micro_batch.sizes),
                                                               micro_batch.parts, tail))  # fmt: skip
    return None if found is None else (found, False)


def step_facts(graph: Graph, micro_batches: int, parts: float, tail: TailNodes | None) -> StepFacts:
    """Return what a plan of a compiled program must have in common with a call."""
    nodes = None if tail is None else tail.nodes
    return StepFacts(graph_key(graph), graph.model_name, micro_batches, parts, nodes, (), recompute=False)


def _load_or_search(
    micro_batch: MicroBatch, known: Profile | None, request: PlanRequest, tail: TailNodes | None, *, is_bound: bool
) -> tuple[CachedPlan, bool]:
    """Return profile, partition and schedule, from the cache or by measurement and search."""
    graph, count, parts = micro_batch.graph, len(micro_batch.sizes), micro_batch.parts

    def build() -> CachedPlan:
        check_deadline(request)
        begin_phase("profile")
        profile = profile_micro_batch(graph, *micro_batch.call, request, parts) if known is None else known
        check_deadline(request)
        begin_phase("search")
        options = request.options(count, parts, on_cpu=_is_on_cpu(graph))
        if request.replicas > 1:
            choice = _choose_replicated(graph, profile, request, count, parts, is_bound=is_bound)
        else:
            choice = search_plan(graph, profile, request, options, is_bound=is_bound, tail=tail)
            if request.may_replicate and is_bound and tail is None:
                choice = _try_replicas(choice, graph, profile, request, count, parts)
        return CachedPlan(profile, choice.partition, choice.analysis, choice.plan, choice.recompute)

    facts = _key_facts(request, count, parts, None if tail is None else tail.nodes)
    found, is_cached = load_or_build(graph, facts, _plan_folder(request), build, quiet=request.quiet)
    partition = found.partition if tail is None else tail.separate_stage(found.partition)
    return replace(found, partition=partition), is_cached


def _choose_replicated(
    graph: Graph, profile: Profile, request: PlanRequest, count: int, parts: float, *, is_bound: bool
) -> ScheduleChoice:
    """Return the choice for one replica with its part of the batch, once per replica."""
    copies = count_replicas(request.replicas, count)
    workers = request.workers // request.replicas
    links = request.links.between(range(workers))
    one = replace(request, workers=workers, micro_batches=count // copies, links=links)
    options = one.options(count // copies, parts / copies, on_cpu=_is_on_cpu(graph))
    costs = scale_to_batch(profile, 1 / copies)
    return choose_with_replicas(copies, lambda: search_plan(graph, costs, one, options, is_bound=is_bound))


def _try_replicas(  # noqa: PLR0917
    stages: ScheduleChoice, graph: Graph, profile: Profile, request: PlanRequest, count: int, parts: float
) -> ScheduleChoice:
    """Return the fastest of a choice without replicas and all with some that share workers and micro-batches evenly."""
    best, weights_mb = stages, sum(p.nbytes for p in graph.bound_model().parameters()) / MB
    for copies in range(2, request.workers + 1):
        if request.workers % copies or count % copies:
            continue
        wanted = replace(request, replicas=copies)
        found = _choose_replicated(graph, profile, wanted, count, parts, is_bound=True)
        sums_ms = copies * weights_mb / _SUMMED_MB_PER_MS
        found = replace(found, analysis=replace(found.analysis, step_ms=found.analysis.step_ms + sums_ms))
        if found.analysis.step_ms < (1 - _MIN_GAIN) * best.analysis.step_ms:
            best = found
    return best


def _key_facts(request: PlanRequest, micro_batches: int, parts: float, tail: tuple[int, ...] | None) -> list[Any]:
    return [request.key_facts(), micro_batches, parts, tail]


def _plan_folder(request: PlanRequest) -> Path | None:
    return None if request.is_from_file else cache_folder("plans", request.cache)


def _replan(plan: StepPlan, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    """Plan again with the measured times of a plan; return the same plan where no other is clearly faster."""
    if plan.program is not None or replicas(plan.schedule) > 1:  # compiled, or replicated: it stays
        return plan
    profile = apply_measured_times(plan)
    options = request.options(plan.micro_batches, plan.captured_parts, on_cpu=_is_on_cpu(plan.graph))
    choice = search_plan(plan.graph, profile, request, options, is_bound=True)
    if not choice.analysis.fits or choice.plan.nsteps > (1 - _MIN_GAIN) * plan.expected.nsteps:
        return plan
    facts = _key_facts(request, plan.micro_batches, plan.captured_parts, None)
    found = CachedPlan(profile, choice.partition, choice.analysis, choice.plan, choice.recompute)
    store(plan.graph, facts, _plan_folder(request), found)
    replanned = replace(
        plan,
        profile=profile,
        partition=choice.partition,
        analysis=choice.analysis,
        schedule=choice.plan,
        name=choice.name,
        measured=None,
        rng_patterns=(),
        buffers_written_once=(),
        is_cached=False,
        shards=None,
        _built={},
    )
    return _add_side_effects(replanned, args, kwargs, request)


def _add_side_effects(plan: StepPlan, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    """Add the buffers that the stages write and the random numbers that they generate."""
    begin_phase("generate stages")
    plan = replace(plan, buffers_written_once=find_written_buffers(plan))
    if plan.recompute and plan.writes_buffers:
        raise UnplannableError("it fits into the workers only with recomputed activations, and it writes buffers")
    if request.rng == "fast" and not request.divides and not random_guards(plan.graph):
        return plan
    piped = plan.build()
    if plan.single_micro_batch_reason:
        patterns, branches = record_whole_batch_rng(piped, args, kwargs), find_whole_batch_branches(piped, args, kwargs)
    else:
        patterns, branches = record_stage_rng(piped, args, kwargs, plan.batch)
        patterns = patterns if plan.tail is None else plan.tail.unslice_patterns(patterns)
    return divide_stages(replace(plan, rng_patterns=patterns, branches=branches), args, kwargs, request)


# ── profile ────────────────────────────────────────────────────────────────────────────────────────────────────────
def profile_micro_batch(
    graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest, parts: float = 1.0
) -> Profile:
    """Return the costs of the whole batch, measured on one of its `parts` equal parts."""
    from gemini.planner.worker_costs import estimate_worker_costs
    from gemini.profiling import profile
    from gemini.profiling.cpu_device import CpuDevice

    on_cpu = _is_on_cpu(graph)
    # Processor time of the thread: other load of this machine is not part of the step.
    device = CpuDevice(clock="cpu") if on_cpu and request.threads == 1 else None
    with _torch_threads(request.threads):
        # Without the cache: the time of a layer depends on the model around it, which fills the processor's caches.
        found = profile(graph, args, kwargs, device=device, rounds=2, check=False, cache=False)
        if on_cpu:
            found = estimate_worker_costs(found, graph, request)
        else:  # all workers share one device, and processes take turns on it
            found = Contention(request.workers, request.workers).slow_down(found)
    return scale_to_batch(add_recomputation(_add_missing_backward(found, graph), graph), parts)


def _is_on_cpu(graph: Graph) -> bool:
    model = graph.bound_model()
    return all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))


def _add_missing_backward(profile: Profile, graph: Graph) -> Profile:
    """Assign every node with a gradient a backward cost, even if it was too short to be measured."""
    nodes = tuple(
        replace(cost, backward_ms=_MIN_MS)
        if not cost.backward_ms and any(meta.requires_grad for meta in graph.nodes[cost.id].outputs.values())
        else cost
        for cost in profile.nodes
    )
    return replace(profile, nodes=nodes)


def scale_to_batch(profile: Profile, parts: float) -> Profile:
    """Return the costs of a batch of `parts` such parts, which the analysis divides by the number of micro-batches."""
    scaled = ("forward_ms", "backward_ms", "forward_peak_mb", "backward_peak_mb", "input_mb", "output_mb", "saved_mb",
              "saved_own_mb", "moved_mb", "forward_moved_mb", "host_ms", "device_ms")  # fmt: skip
    nodes = tuple(replace(node, **{name: getattr(node, name) * parts for name in scaled}) for node in profile.nodes)
    values = tuple(size * parts for size in profile.values_mb)
    return replace(profile, nodes=nodes, values_mb=values, check=None, unchecked="scaled from a micro-batch")


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
