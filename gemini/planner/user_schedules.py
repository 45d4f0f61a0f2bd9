"""User schedules: a schedule file of the user, or a schedule of the library with replicas of the model.

The schedule fixes the number of stages and their workers. The model is cut accordingly, and the schedule is simulated
with the times of the model. A schedule whose micro-batch has several independent parts (chimera, `xshape`) has as
many *replicas*: stage s of each is the same stage of the model, with the same weights, on another worker, and one
micro-batch of the schedule stands for one of the model through each replica.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.errors import InvalidPlanError, PartitionError, ScheduleError
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.partition import partition
from gemini.partition.analysis.analysis_builder import analyse
from gemini.partition.analysis.analysis_result import Analysis
from gemini.partition.assignment import Partition
from gemini.partition.partition_options import Options
from gemini.planner.schedule_choice import ScheduleChoice, step_overhead_ms
from gemini.planner.stage_memory import StageMemories
from gemini.planner.worker_memory import add_worker_memory
from gemini.profiling.profile_result import Profile
from gemini.schedule.block import FORWARD, Block
from gemini.schedule.library import library
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.simulate import simulate
from gemini.schedule.user_plan import load_user_plan, replicas

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan


def choose_from_file(
    graph: Graph, profile: Profile, options: Options, path: Path, *, nworkers: int, micro_batches: int
) -> ScheduleChoice:
    """Cut the model for a schedule file; raises InvalidPlanError where that has another number of micro-batches.

    A batch with fewer samples takes the first micro-batches of the schedule.
    """
    plan = load_user_plan(path, nworkers, micro_batches)
    return choose_for_schedule(
        graph, profile, options, plan.first(_count_plan_micro_batches(plan, path.name, options)), path.name
    )


def choose_replicated(graph: Graph, profile: Profile, options: Options, name: str, nworkers: int) -> ScheduleChoice:
    """Cut the model for a schedule of the library with two replicas."""
    pairs, rest = divmod(options.micro_batches, 2)
    if rest or nworkers % 2:
        raise ScheduleError(
            f"{name} needs even numbers of workers and micro-batches, not {nworkers} and {options.micro_batches}\n"
            "    → accum_degree and pipeline_degree of even numbers, or schedule='auto'"
        )
    return choose_for_schedule(graph, profile, options, library(name, nworkers, pairs), name)


def _count_plan_micro_batches(plan: SchedPlan, name: str, options: Options) -> int:
    """Return the number of micro-batches of the schedule that a batch uses."""
    count, rest = divmod(options.micro_batches, replicas(plan))
    if rest:
        raise ScheduleError(
            f"{name} takes {replicas(plan)} micro-batches at a time, there are {options.micro_batches}\n"
            "    → batches of as many samples, or schedule='auto'"
        )
    return count


def choose_for_schedule(graph: Graph, profile: Profile, options: Options, plan: SchedPlan, name: str) -> ScheduleChoice:
    """Cut the model for a schedule, and predict its step."""
    devices = {block.stage or 0: plan.device(block) for block in plan if block.btype == FORWARD}
    stages = (max(devices) + 1) // replicas(plan)
    cut = _cut(graph, profile, stages, replace(options, workers=(), mixed=False, chunks=1), plan)
    if cut.nstages != stages:
        raise InvalidPlanError(
            f"{name} is a plan for {stages} stages, {graph.model_name} can be cut into {cut.nstages}\n"
            "    → compose a plan for as many"
        )
    made = replace(cut, nparts=plan.ndevs, workers=tuple(devices[stage][0] for stage in range(stages)))
    found = analyse(graph, profile, made, replace(options, workers=(), schedule="1f1b"))
    work = {
        (stage.stage, kind): ms
        for stage in found.stages
        for kind, ms in _split_times(stage.forward_ms, stage.backward_ms)
    }
    took = {
        block: max(
            work[(block.stage or 0) % stages, block.btype] / options.micro_batches / len(plan.device(block)), 1e-9
        )
        for block in plan
    }
    ran = simulate(plan, spans=lambda block: took[block], links=options.links).require()
    timed = ran.executed()
    judged = replace(found, schedule=name, step_ms=float(ran.makespan) + step_overhead_ms(graph), plan=timed)
    return ScheduleChoice(made, _add_memory(judged, made, StageMemories(graph, profile, options.micro_batches)), timed)


def _cut(graph: Graph, profile: Profile, stages: int, options: Options, plan: SchedPlan) -> Partition:
    """Cut the model; where the first stages have no backward, what is trained begins after them, if possible."""
    trained = {(block.stage or 0) % stages for block in plan if block.btype != FORWARD}
    first = min(trained, default=0)
    frozen = [node for node in graph.compute_nodes if not any(one.requires_grad for one in node.outputs.values())]
    learning = [node for node in graph.compute_nodes if any(one.requires_grad for one in node.outputs.values())]
    if first and frozen and learning and not options.pins:
        pins = {_scope(frozen[0]): 0, _scope(learning[0]): first}
        with suppress(PartitionError):
            return partition(graph, profile, stages, "exact", replace(options, pins=pins))
    return partition(graph, profile, stages, "exact", options)


def _scope(node: Node) -> str:
    return node.target if node.kind == "module" else node.scope[-1] if node.scope else ""


def check_backward_blocks(plan: StepPlan) -> None:
    """Raise InvalidPlanError where a schedule file has no backward for a stage with trained parameters."""
    backward = {(block.stage or 0) % plan.nstages for block in plan.schedule if block.btype != FORWARD}
    stages = plan.build().stages
    wrong = [
        at for at, stage in enumerate(stages) if at not in backward and any(p.requires_grad for p in stage.parameters())
    ]
    if wrong:
        raise InvalidPlanError(
            f"{plan.name} has no backward for stages {wrong}, which train parameters\n"
            "    → freeze these (requires_grad_(False)), or give a plan with their backward"
        )


def _split_times(forward_ms: float, backward_ms: float) -> list[tuple[str, float]]:
    half = backward_ms / 2
    return [(FORWARD, forward_ms), ("backward", backward_ms), ("input_gradient", half), ("weight_gradient", half)]


def _add_memory(analysis: Analysis, made: Partition, known: StageMemories) -> Analysis:
    """Add the memory of workers; each holds the weights of all stages that it runs, of any replica."""
    plan = analysis.plan
    assert plan is not None
    if replicas(plan) == 1:
        return add_worker_memory(analysis, made, known)
    unfolded = _unfold_replicas(plan, made.nstages)
    workers = []
    for one in analysis.workers:
        stages = sorted({block.stage or 0 for block in unfolded.device_blocks(one.worker)})
        held = [analysis.stages[stage].memory for stage in stages]
        memory = replace(
            one.memory,
            weights_mb=sum(part.weights_mb for part in held),
            gradients_mb=sum(part.gradients_mb for part in held),
            optimizer_mb=sum(part.optimizer_mb for part in held),
        )
        workers.append(replace(one, stages=tuple(stages), memory=memory))
    judged = add_worker_memory(replace(analysis, workers=tuple(workers), plan=unfolded), made, known)
    return replace(judged, plan=plan)


def _unfold_replicas(plan: SchedPlan, nstages: int) -> SchedPlan:
    """Return the blocks of a schedule with replicas as stages and micro-batches of the model, at the same times."""
    count = replicas(plan)
    found = SchedPlan(plan.ndevs)
    for block in plan:
        copy, stage = divmod(block.stage or 0, nstages)
        twin = Block(block.mid * count + copy, block.span, block.memory, block.btype, stage=stage)
        found.add_block(twin, plan.device(block), plan.step(block))
    return found
