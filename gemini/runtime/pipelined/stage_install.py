"""Stage installation: the stages of a plan in the workers, once for all kinds of calls with the same stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemini.batch_analysis.side_effects import written_buffers
from gemini.codegen.stage_reads import needed_nodes
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
    """Return the stages in the workers, with the weights that this loss needs; `known` kinds may share theirs."""
    assert kind.plan is not None
    if kind.origin is not None:
        executor = get_executor(kind.origin, prepared, known, managed)
        kind.shares = kind.origin.shares
        return executor
    wanted = set(prepared.splitting.node_shares)
    if kind.executor is None or not wanted <= set(kind.shares):
        kind.shares = tuple(sorted(wanted | set(kind.shares)))
        piped = kind.plan.build(kind.shares)
        if kind.plan.program is not None and piped.folder is None:
            kind.plan.program.note_generated(managed.name)
        kind.executor = _find_installed(kind, piped, known)
        if kind.executor is not None:
            return kind.executor
        recompute = range(kind.plan.nstages) if kind.plan.recompute else ()
        tail = build_tail(kind.plan, piped)
        made = program_of(
            piped, kind.plan.schedule, recompute=recompute, rng_patterns=kind.plan.rng_patterns, tail=tail,
            shards=kind.plan.shard_count,
        )  # fmt: skip
        local, shards = kind.plan.local, kind.plan.shards
        program = replace(
            made,
            collectives=()
            if local is None or shards is None
            else local.collectives(shards, needed_nodes(local.graph)),
            once=kind.plan.buffers_written_once, detached=_find_detached(kind.plan),
            written=_find_written(kind.plan, piped) if kind.plan.shards is not None else {},
        )  # fmt: skip
        executor = Executor(
            managed.pool, managed.shared_parameters, program, piped.stage_tensors.follow,
            shard_plan=kind.plan.shards, replicate=managed.note_weights_sent if managed.replicates else None,
        )  # fmt: skip
        executor.install(piped.stages, {f"{piped.where}/{name}": text for name, text in piped.sources.items()})
        kind.executor = executor  # only now: stages that could not be sent are sent again
        _record_holdings(kind.plan, managed)
    return kind.executor


def _drawing(plan: StepPlan) -> list[bool]:
    """Return which stages use random numbers; the patterns of these are sent with the steps."""
    return [bool(patterns) for patterns in plan.rng_patterns]


def _record_holdings(plan: StepPlan, managed: PlacedModel) -> None:
    """Record what workers hold of a model, for the message about the loss of one."""
    for one in plan.analysis.workers:
        stages = ", ".join(map(str, one.stages))
        word = "stage" if len(one.stages) == 1 else "stages"
        planned = format_bytes(one.memory.total_mb * MB)
        for shard in range(plan.shard_count):
            which = f", shard {shard}" if plan.shard_count > 1 else ""
            managed.pool.workers[one.worker * plan.shard_count + shard].contents[managed.name] = (
                f"{word} {stages}{which} of {managed.name} ({planned} planned)"
            )


def _divisions(plan: StepPlan) -> Any:
    """Return how the tensors of the model are divided."""
    return None if plan.shards is None else (plan.shards.size, plan.shards.tensors)


def _find_written(plan: StepPlan, piped: Piped) -> dict[int, tuple[int, ...]]:
    """Return the positions of the buffers that each stage writes: shards other than the first write copies."""
    names, held = written_buffers(plan.graph), dict(piped.model.named_buffers(remove_duplicate=False))
    written = {id(held[name]) for name in names}
    return {
        stage: tuple(at for at, one in enumerate(module.buffers()) if id(one) in written)
        for stage, module in enumerate(piped.stages)
    }


def _find_detached(plan: StepPlan) -> frozenset[int]:
    """Return the stages in which nothing has a gradient: their weights are only read."""
    nodes = plan.graph.nodes
    return frozenset(
        stage
        for stage, held in enumerate(plan.partition.stages)
        if not any(meta.requires_grad for at in held for meta in nodes[at].outputs.values())
    )


def _find_installed(kind: CallKind, piped: Piped, known: Iterable[CallKind]) -> Executor | None:
    """Return the installed stages of another sequence length, where their source is the same."""
    assert kind.plan is not None
    for other in known:
        if other is kind or other.executor is None or other.plan is None or other.shares != kind.shares:
            continue
        mine, their = kind.plan, other.plan
        same = their.schedule is mine.schedule and _drawing(their) == _drawing(mine)
        same = same and their.buffers_written_once == mine.buffers_written_once and their.tail == mine.tail
        same = same and their.recompute == mine.recompute and _divisions(their) == _divisions(mine)
        if same and other.plan.build(other.shares).sources == piped.sources:
            return other.executor
    return None
