"""Scheduling: the fastest schedule for a model among layouts, by simulation on measured times.

For every layout all schedules of the library that run on it, and composed ones, are simulated with the times of the
profile and the cost of the links. A schedule that is asked for by name is taken on the layout that suits it best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gemini.errors import GeminiError, ScheduleError
from gemini.ir.graph import Graph
from gemini.partition.analysis.analysis_builder import analyse
from gemini.partition.analysis.analysis_result import Analysis
from gemini.partition.assignment import Partition
from gemini.partition.partition_options import Options
from gemini.partition.step_estimate import COMPOSED, find_schedule
from gemini.planner.stage_memory import StageMemories
from gemini.planner.worker_memory import add_worker_memory
from gemini.profiling.profile_result import Profile
from gemini.schedule.library import LIBRARY
from gemini.schedule.schedplan import SchedPlan

AUTO = "auto"
_NEAR = 0.03  # a step so close to an even share without any waiting is good enough
ACTION_MS = 0.2  # what a worker does around an action: messages, modes, the beginning and end of a graph
# From the call to the first action and from the last to the end of backward: 5.7 ms for 46 parameters and 6.4 for 133
# where the program's own process computed 4.4 and 4.7 of them, before that became less (`benchmarks/bench_overlap.py`).
_STEP_MS, _PARAMETER_MS = 3.5, 0.015
_WORTH = 0.01  # a schedule further down the list must be faster by this share to be taken
Rearrange = Callable[[SchedPlan], SchedPlan]
REPLICATED = ("chimera",)  # needs the weights of a stage in two places: never chosen by itself


@dataclass(frozen=True)
class ScheduleChoice:
    """A layout with a schedule, and what they are expected to do."""

    partition: Partition
    analysis: Analysis
    plan: SchedPlan
    recompute: bool = False  # whether stages compute their activations again in backward

    @property
    def name(self) -> str:
        """The schedule."""
        return self.analysis.schedule


def choose_schedule(
    graph: Graph, profile: Profile, layouts: Iterable[Partition], options: Options, schedule: str = AUTO,
    *, arranged: Rearrange | None = None,
) -> ScheduleChoice:  # fmt: skip
    """The fastest of all; raises ScheduleError where a schedule that was asked for runs on no layout.

    `arranged` brings every schedule to a form that a step needs; it raises where that cannot be.
    """
    best: ScheduleChoice | None = None
    tried: list[ScheduleChoice] = []
    refusals: list[GeminiError] = []
    known = StageMemories(graph, profile, options.micro_batches, recompute=options.recompute)
    for partition in layouts:
        for found in _simulate_schedules(known, partition, options, schedule, arranged, refusals):
            tried.append(found)
            if best is not None and _lower_bound_ms(found) >= best.analysis.step_ms * (1 - _WORTH):
                break  # no schedule makes this layout faster
            if found.analysis.fits and (best is None or _is_faster(found, best)):
                best = found
        if best is not None and best.analysis.step_ms <= best.analysis.ideal_ms * (1 + _NEAR):
            break  # no layout makes it much faster
    if best is None and tried:
        best = min(tried, key=lambda one: max(worker.memory.total_mb for worker in one.analysis.workers))
    if best is None:
        why = f": {str(refusals[0]).partition(chr(10))[0]}" if refusals else ""
        raise ScheduleError(
            f"{schedule} does not run on any layout of {graph.model_name} on these workers{why}\n"
            f"    → schedule='auto', or one of {', '.join(name for name in LIBRARY if name != schedule)}"
        )
    return best if options.workers else replace(best, analysis=add_worker_memory(best.analysis, best.partition, known))


def _is_faster(one: ScheduleChoice, other: ScheduleChoice) -> bool:
    return one.analysis.step_ms < other.analysis.step_ms * (1 - _WORTH)


def _lower_bound_ms(found: ScheduleChoice) -> float:
    """What the busiest worker computes: no schedule is faster."""
    return max(worker.forward_ms + worker.backward_ms for worker in found.analysis.workers)


def _simulate_schedules(  # noqa: PLR0917
    known: StageMemories, partition: Partition, options: Options, schedule: str, arranged: Rearrange | None,
    refusals: list[GeminiError],
) -> Iterator[ScheduleChoice]:  # fmt: skip
    """Those of one layout; what is refused is put to the others."""
    for name in _schedule_names() if schedule == AUTO else [find_schedule(schedule)]:
        wanted = replace(options, schedule=name)
        try:
            found = analyse(known.graph, known.profile, partition, wanted)
            if arranged is not None and found.plan is not None:
                plan = arranged(found.plan)
                found = replace(found, plan=plan, step_ms=float(plan.nsteps))
        except GeminiError as error:
            refusals.append(error)
            continue
        if found.schedule == name and found.plan is not None:  # else shown for another one
            timed = replace(found, step_ms=found.step_ms + step_overhead_ms(known.graph))
            judged = add_worker_memory(timed, partition, known) if options.workers else timed
            yield ScheduleChoice(partition, judged, found.plan, options.recompute)


def step_overhead_ms(graph: Graph) -> float:
    """What the program's own process does before the first action of a step and after the last (ms)."""
    trained = sum(bool(parameter.requires_grad) for parameter in graph.bound_model().parameters())
    return _STEP_MS + _PARAMETER_MS * trained


def _schedule_names() -> list[str]:
    return [*(name for name in LIBRARY if name not in REPLICATED), COMPOSED]
