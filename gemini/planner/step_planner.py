"""Planning: the flow from a model and a batch to the plan of its step.

    samples ─► capture of a micro-batch ─► proof that it may be one ─► profile ─► layouts ─► schedule ─► stages

All is about one micro-batch, on as many threads as a worker has: so the simulation is about what will run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batchnorm import couples
from gemini.batch_analysis.precompute import random_guards
from gemini.cache.plans import keep, kept_or_made
from gemini.capture.batch_dim import BatchLayout
from gemini.ir.graph import Graph
from gemini.planner.buffer_writes import check_left, find_written
from gemini.planner.contention import Contention
from gemini.planner.gradient_precondition import check_held, check_read
from gemini.planner.hook_precondition import check_hooks
from gemini.planner.microbatch_capture import Piece, prove_piece
from gemini.planner.plan_request import PlanRequest
from gemini.planner.plan_reuse import find_equivalent_plan
from gemini.planner.plan_search import chosen
from gemini.planner.replan import learned
from gemini.planner.rng_analysis import check_foreign, record_draws
from gemini.planner.sample_dims import find_samples
from gemini.planner.schedule_choice import Choice
from gemini.planner.script_precondition import check_scripted
from gemini.planner.single_microbatch import whole_batch, whole_branches, whole_draws
from gemini.planner.step_plan import MeetingError, StepPlan, UnplannableError
from gemini.planner.tail_plan import (
    TailNodes,
    check_backward,
    meets_late,
    tail_for,
    tail_of,
)
from gemini.planner.user_schedules import check_trained
from gemini.profiling.profile_result import Profile
from gemini.quiet_warnings import muted

_SHORT = 1e-6  # ms
_CLEARLY = 0.05  # of a step, by which another plan must be shorter to take the place of one that runs


def plan_step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    """The plan for calls like this one; raises UnplannableError, or what is wrong with the request."""
    check_hooks(model)
    check_scripted(model)
    check_held(model)
    with muted():  # its calls will give its warnings
        known = request.measured_plan
        return _plan(model, args, kwargs, request) if known is None else _again(known, args, kwargs, request)


def _plan(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    reason, batch = request.single_micro_batch_reason, find_samples(model, args, kwargs)
    if not reason:
        try:
            return _split(model, args, kwargs, batch, request)
        except UnplannableError as error:
            if request.current_branch or request.is_from_file:
                raise
            reason = f"{request.gather_reason}; {error}" if request.gather_reason else str(error)
            found = _gathered(model, args, kwargs, batch, request, reason) if isinstance(error, MeetingError) else None
            if found is not None:
                return found
    try:
        return _planned(*whole_batch(model, args, kwargs, batch, request), reason, args, kwargs, request)
    except UnplannableError as error:
        raise UnplannableError(reason if str(error) in reason else f"{reason}; and as one: {error}") from error


def _again(plan: StepPlan, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    """A plan made again from what its actions took; the same one where no other is clearly faster."""
    profile = learned(plan)
    options = request.options(plan.micro_batches, plan.repeats, on_cpu=_is_on_cpu(plan.graph))
    choice = chosen(plan.graph, profile, request, options, is_bound=True)
    if not choice.analysis.fits or choice.plan.nsteps > (1 - _CLEARLY) * plan.expected.nsteps:
        return plan
    keep(plan.graph, request, plan.micro_batches, plan.repeats, (profile, choice))
    made = replace(
        plan,
        profile=profile,
        partition=choice.partition,
        analysis=choice.analysis,
        schedule=choice.plan,
        name=choice.name,
        rehearsed=None,
        draws=(),
        once=(),
        is_kept=False,
        _built={},
    )
    return _with_effects(made, args, kwargs, request)


def _gathered(  # noqa: PLR0917
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: BatchLayout | None,
    request: PlanRequest,
    reason: str,
) -> StepPlan | None:
    """A plan for a model in whose end samples meet; None where there is none."""
    if request.gather_reason or not meets_late(model):
        return None
    try:
        return _split(model, args, kwargs, batch, replace(request, gather_reason=reason))
    except UnplannableError:
        return None


def _split(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout | None, request: PlanRequest
) -> StepPlan:
    if not request.gather_reason:
        _check_coupling(model, request)
    if batch is None:
        raise UnplannableError("none of its inputs counts samples")
    if batch.size < 2:
        raise UnplannableError("there is only one sample")
    found = prove_piece(model, args, kwargs, batch, request)
    if not request.gather_reason:
        return _planned(found, batch, "", args, kwargs, request)
    if request.is_from_file:
        raise UnplannableError("the loss compares samples, and a plan of a file does not wait for all of them")
    return _planned(found, batch, "", args, kwargs, request, tail_for(found.forms, request.gather_reason))


def _planned(  # noqa: PLR0917
    found: Piece, batch: BatchLayout, unsplit: str, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest,
    tail: TailNodes | None = None,
) -> StepPlan:  # fmt: skip
    """The plan for what a stage sees at a time; `unsplit` says why that is all of a batch."""
    graph, forms, piece, sizes, pieces = found.graph, found.forms, found.call, found.sizes, found.pieces
    check_read(graph)
    check_foreign(graph)
    check_left(graph, forms, unsplit)
    like = find_equivalent_plan(request, graph, len(sizes))
    if like is not None and like[0].tail == tail:
        earlier, ratio = like
        analysis = replace(earlier.analysis, step_ms=earlier.step_ms * ratio)
        plan = replace(
            earlier,
            graph=graph,
            analysis=analysis,
            batch=batch,
            forms=forms,
            draws=(),
            once=(),
            branches=None,
            repeats=pieces,
            rehearsed=None,
            _built={},
        )
    else:

        def make() -> tuple[Profile, Choice]:
            profile = _profiled(graph, *piece, request, pieces) if like is None or like[1] != 1 else like[0].profile
            options = request.options(len(sizes), pieces, on_cpu=_is_on_cpu(graph))
            return profile, chosen(graph, profile, request, options, is_bound=not unsplit, tail=tail)

        nodes = None if tail is None else tail.nodes
        profile, choice, is_kept = kept_or_made(graph, request, len(sizes), pieces, make, tail=nodes)
        partition = choice.partition if tail is None else tail.apart(choice.partition)
        plan = StepPlan(
            graph, profile, partition, choice.analysis, choice.plan, choice.name, len(sizes), batch, forms, (),
            tail=tail, repeats=pieces, recompute=choice.recompute, is_kept=is_kept,
        )  # fmt: skip
        if request.is_from_file and torch.is_grad_enabled():
            check_trained(plan)
        if tail is not None:
            tail_of(plan, plan.build())
            check_backward(plan, plan.build())
    return _with_effects(replace(plan, unsplit=unsplit), args, kwargs, request)


def _with_effects(plan: StepPlan, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    """With the buffers that its stages write, and the numbers that they draw."""
    plan = replace(plan, once=find_written(plan))
    if plan.recompute and plan.writes:
        raise UnplannableError("it does not fit into the workers unless stages are run again, and it writes buffers")
    if request.rng == "fast" and not random_guards(plan.graph):
        return plan
    if plan.unsplit:
        piped = plan.build()
        return replace(plan, draws=whole_draws(piped, args, kwargs), branches=whole_branches(piped, args, kwargs))
    draws, branches = record_draws(plan.build(), args, kwargs, plan.batch)
    return replace(plan, draws=draws if plan.tail is None else plan.tail.draws(draws), branches=branches)


def _check_coupling(model: nn.Module, request: PlanRequest) -> None:
    """Batch normalization in training: at once, for a capture would not change it."""
    found = [name for name, module in model.named_modules() if couples(module)]
    if found and not request.micro_batch_statistics:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise MeetingError(
            f"batch normalization in training ({found[0]}{others}) takes statistics over the batch; "
            "batch_norm='micro-batch' would let every micro-batch have its own"
        )


def _profiled(
    graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest, pieces: float
) -> Profile:
    from gemini.planner.worker_costs import estimate_worker_costs
    from gemini.profiling import profile
    from gemini.profiling.cpu_device import CpuDevice

    on_cpu = _is_on_cpu(graph)
    # Processor time of the thread: whatever else runs on this machine now will not when the plan is followed.
    device = CpuDevice(clock="cpu") if on_cpu and request.threads == 1 else None
    with _threads(request.threads):
        # Afresh: how long a layer takes depends on what else is in the caches, so on the model around it.
        found = profile(graph, args, kwargs, device=device, rounds=2, check=False, cache=False)
        if on_cpu:
            found = estimate_worker_costs(found, graph, request)
        else:  # steps run by plans where all workers have the same device, and processes take turns on it
            found = Contention(request.workers, request.workers).slowed(found)
    return _of_all_pieces(_learning(found, graph), pieces)


def _is_on_cpu(graph: Graph) -> bool:
    model = graph.bound_model()
    return all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers()))


def _learning(profile: Profile, graph: Graph) -> Profile:
    """Whatever has a gradient has a backward in the plan, even where it was too short to be measured."""
    nodes = tuple(
        replace(cost, backward_ms=_SHORT)
        if not cost.backward_ms and any(meta.requires_grad for meta in graph.nodes[cost.id].outputs.values())
        else cost
        for cost in profile.nodes
    )
    return replace(profile, nodes=nodes)


def _of_all_pieces(profile: Profile, pieces: float) -> Profile:
    """The costs of the whole batch if it is run in equal pieces: what is later divided among them."""
    scaled = ("forward_ms", "backward_ms", "forward_peak_mb", "backward_peak_mb", "input_mb", "output_mb", "saved_mb",
              "saved_own_mb", "moved_mb", "forward_moved_mb", "host_ms", "device_ms")  # fmt: skip
    nodes = tuple(replace(node, **{name: getattr(node, name) * pieces for name in scaled}) for node in profile.nodes)
    values = tuple(size * pieces for size in profile.values_mb)
    return replace(profile, nodes=nodes, values_mb=values, check=None, unchecked="scaled from a micro-batch")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
