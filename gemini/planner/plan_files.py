"""Plans from files: a schedule that somebody has composed, saved and asks for.

The file says how many stages there are and on which worker each lies. The model is cut into so many, and the schedule
is simulated with the times of the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gemini.capture.graph import Graph
from gemini.errors import InvalidPlanError
from gemini.partition import partition
from gemini.partition.analysis import analyse
from gemini.partition.options import Options
from gemini.planner.scheduling import Choice
from gemini.planner.stage_memory import StageMemories
from gemini.planner.worker_memory import with_memory
from gemini.profiling.result import Profile
from gemini.schedule.asked import asked_plan
from gemini.schedule.block import FORWARD
from gemini.schedule.simulate import simulate


def by_file(
    graph: Graph, profile: Profile, options: Options, path: Path, *, nworkers: int, micro_batches: int
) -> Choice:
    """The model cut as a plan needs it; raises InvalidPlanError where the plan is not for so many micro-batches.

    A batch may have fewer samples than that: it takes the plan's first micro-batches.
    """
    plan = asked_plan(path, nworkers, micro_batches).first(options.micro_batches)
    homes = {block.stage or 0: plan.device(block) for block in plan if block.btype == FORWARD}
    stages = max(homes) + 1
    cut = partition(graph, profile, stages, "exact", replace(options, workers=(), mixed=False, chunks=1))
    if cut.nstages != stages:
        raise InvalidPlanError(
            f"{path} is a plan for {stages} stages, {graph.model_name} can be cut into {cut.nstages}\n"
            "    → compose a plan for as many"
        )
    made = replace(cut, nparts=nworkers, workers=tuple(homes[stage][0] for stage in range(stages)))
    found = analyse(graph, profile, made, replace(options, workers=(), schedule="1f1b"))
    work = {
        (stage.stage, kind): ms for stage in found.stages for kind, ms in _spans(stage.forward_ms, stage.backward_ms)
    }
    spans = {block: max(work[block.stage or 0, block.btype] / options.micro_batches, 1e-9) for block in plan}
    ran = simulate(plan, spans=lambda block: spans[block], links=options.links).require()
    judged = replace(found, schedule=path.name, step_ms=float(ran.makespan), plan=ran.executed())
    return Choice(made, with_memory(judged, made, StageMemories(graph, profile, options.micro_batches)), plan)


def _spans(forward_ms: float, backward_ms: float) -> list[tuple[str, float]]:
    half = backward_ms / 2
    return [(FORWARD, forward_ms), ("backward", backward_ms), ("input_gradient", half), ("weight_gradient", half)]
