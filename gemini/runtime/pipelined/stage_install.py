"""Installing: the stages of a plan in the workers, once for all kinds of calls whose stages are the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini.planner.tail_plan import build_tail
from gemini.profiling.measured_device import MB
from gemini.runtime.devices.host_memory import format_bytes
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.loss_request import PreparedLoss
from gemini.runtime.pipelined.step_executor import Executor
from gemini.step.worker_program import program_of

if TYPE_CHECKING:
    from gemini.pipe.piped_model import Piped
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.eager.placed_model import PlacedModel


def get_executor(kind: CallKind, prepared: PreparedLoss, known: Iterable[CallKind], managed: PlacedModel) -> Executor:
    """The stages in the workers, with the factors that this loss needs; `known` kinds may have them already."""
    assert kind.plan is not None
    wanted = set(prepared.splitting.node_shares)
    if kind.executor is None or not wanted <= set(kind.shares):
        kind.shares = tuple(sorted(wanted | set(kind.shares)))
        piped = kind.plan.build(kind.shares)
        kind.executor = _find_installed(kind, piped, known)
        if kind.executor is not None:
            return kind.executor
        recompute = range(kind.plan.nstages) if kind.plan.recompute else ()
        tail = build_tail(kind.plan, piped)
        made = program_of(
            piped, kind.plan.schedule, recompute=recompute, rng_patterns=kind.plan.rng_patterns, tail=tail
        )
        program = replace(made, once=kind.plan.buffers_written_once, detached=_find_detached(kind.plan))
        executor = Executor(managed.pool, managed.shared_parameters, program, piped.stage_tensors.follow)
        where = f"<stages of {type(piped.model).__name__}>"
        executor.install(piped.stages, {f"{where}/{name}": text for name, text in piped.sources.items()})
        kind.executor = executor  # not before: stages that could not be sent are sent anew, or fail as they did
        _record_holdings(kind.plan, managed)
    return kind.executor


def _record_holdings(plan: StepPlan, managed: PlacedModel) -> None:
    """Have workers know what they have of a model, for the case that one is lost."""
    for one in plan.analysis.workers:
        stages = ", ".join(map(str, one.stages))
        word = "stage" if len(one.stages) == 1 else "stages"
        planned = format_bytes(one.memory.total_mb * MB)
        managed.pool.workers[one.worker].holds[managed.name] = f"{word} {stages} of {managed.name} ({planned} planned)"


def _find_detached(plan: StepPlan) -> frozenset[int]:
    """The stages in which nothing has a gradient: weights in them may only be looked at."""
    nodes = plan.graph.nodes
    return frozenset(
        stage
        for stage, held in enumerate(plan.partition.stages)
        if not any(meta.requires_grad for at in held for meta in nodes[at].outputs.values())
    )


def _find_installed(kind: CallKind, piped: Piped, known: Iterable[CallKind]) -> Executor | None:
    """The stages of another length, where their text is the same."""
    assert kind.plan is not None
    for other in known:
        if other is kind or other.executor is None or other.plan is None or other.shares != kind.shares:
            continue
        mine, their = kind.plan, other.plan
        same = their.schedule is mine.schedule and their.rng_patterns == mine.rng_patterns
        same = same and their.buffers_written_once == mine.buffers_written_once and their.tail == mine.tail
        same = same and their.recompute == mine.recompute
        if same and other.plan.build(other.shares).sources == piped.sources:
            return other.executor
    return None
