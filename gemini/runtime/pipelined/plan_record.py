"""Plan record: a plan and the steps measured by it, as a file for `gemini report`.

    planned, measured    rows [worker, stage, micro-batch, letter, begin, span] of actions, in ms
    nodes                rows [name, module, operation, stage, ms per batch, shape] in execution order
    memory               predicted memory of each worker in MB, by purpose
    shards               layouts and collectives by scope (`PlanSummary.texts`); null where stages are undivided
    analysis             `Analysis.to_json`

Written after the first steps, and at a few later ones: a process may end at any time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.atomic_files import write_whole
from gemini.planner.shard_memory import estimate_workers
from gemini.runtime.pipelined.measured_schedule import TYPES
from gemini.runtime.pipelined.step_request import TraceEvent
from gemini.schedule.block import LETTERS
from gemini.schedule.user_plan import replicas
from gemini.tensor_parallel.plan_summary import PlanSummary

if TYPE_CHECKING:
    from gemini.ir.node import Node
    from gemini.planner.step_plan import StepPlan

FORMAT = 2
RECORDED_STEPS = (1, 3, 10, 100, 1000)
Row = tuple[int, int, int, str, float, float]


def save_record(
    path: Path,
    plan: StepPlan,
    steps: Sequence[tuple[list[TraceEvent], float]],
    number: int,
    peak_mb: tuple[float, ...],
) -> None:
    """Write a plan with measured steps: the events and the duration of each, the recorded step `number` last."""
    content = {
        "format": FORMAT,
        "step": number,
        "name": plan.name,
        "text": str(plan),
        "micro_batches": plan.micro_batches,
        "batch_size": plan.batch.size,
        "recompute": plan.recompute,
        "single_micro_batch_reason": plan.single_micro_batch_reason,
        "workers": plan.nworkers,
        "stages": plan.nstages,
        "predicted_ms": plan.step_ms,
        "profiled_ms": plan.analysis.step_ms,
        "peak_mb": peak_mb,
        "planned": planned_rows(plan),
        "measured": [{"ms": ms, "rows": measured_rows(events)} for events, ms in steps],
        "nodes": _node_rows(plan),
        "analysis": plan.analysis.to_json(),
        "memory": [asdict(memory) for memory in estimate_workers(plan)],
        "shards": None if plan.shards is None else PlanSummary(plan.graph, plan.shards).texts(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content) + "\n", sync=False)


def planned_rows(plan: StepPlan) -> list[Row]:
    """Return the actions of the plan with their predicted times; all shards of a stage run an action together."""
    schedule, copies = plan.expected, replicas(plan.schedule)
    rows: list[Row] = []
    for block in schedule:
        replica, stage = divmod(block.stage or 0, plan.nstages)
        letter = LETTERS.get(block.btype, block.btype)
        begin, span = round(float(schedule.step(block)), 3), round(float(block.span), 3)
        rows += [
            (device * plan.shard_count + shard, stage, block.mid * copies + replica, letter, begin, span)
            for device in schedule.device(block)
            for shard in range(plan.shard_count)
        ]
    return rows


def measured_rows(events: Sequence[TraceEvent]) -> list[Row]:
    """Return the actions of a step as they ran, from the first one."""
    done = [event for event in events if event.kind in TYPES]
    first = min((event.begin for event in done), default=0.0)
    return [
        (
            event.worker,
            event.stage,
            event.mid,
            LETTERS.get(event.kind, event.kind),
            round((event.begin - first) * 1e3, 3),
            round((event.end - event.begin) * 1e3, 3),
        )
        for event in done
    ]


def _node_rows(plan: StepPlan) -> list[tuple[str, str, str, int, float, list[int]]]:
    costs = {cost.id: cost.ms for cost in plan.profile.nodes}
    return [
        (
            node.name,
            node.scope[-1] if node.scope else "",
            node.cls or node.target.rpartition(".")[2],
            plan.partition.stage_of[node.id],
            round(costs.get(node.id, 0.0), 4),
            _shape(node),
        )
        for node in plan.graph.compute_nodes
    ]


def _shape(node: Node) -> list[int]:
    first: Any = next(iter(node.outputs.values()), None)
    return [] if first is None else list(first.shape)
