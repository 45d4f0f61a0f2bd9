"""Schedule choice: the fastest schedule over several stage layouts, by simulation with measured times.

For every layout, all schedules of the library that run on it and a composed one are simulated with the times of the
profile and the costs of the links. A schedule requested by name is simulated on every layout.
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
_GOOD_ENOUGH = 0.03  # above the step time of perfect balance without idle time: the search stops
ACTION_MS = 0.2  # overhead per action in a worker: messages, modes, begin and end of its autograd graph
# From the call to the first action and from the last to the end of backward: 5.7 ms for 46 parameters and 6.4 for 133
# of which the controller computed 4.4 and 4.7 (`benchmarks/bench_overlap.py`); the constants are the rest.
_STEP_MS, _PARAMETER_MS = 3.5, 0.015
_MIN_GAIN = 0.01  # a schedule further down the list must be faster by this share
Rearrange = Callable[[SchedPlan], SchedPlan]
REPLICATED = ("chimera",)  # these hold the weights of a stage on two workers: never chosen automatically


@dataclass(frozen=True)
class ScheduleChoice:
    """A layout with a schedule, and their predicted costs."""

    partition: Partition
    analysis: Analysis
    plan: SchedPlan
    recompute: bool = False  # stages recompute their activations in backward

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.analysis.schedule


def choose_schedule(
    graph: Graph, profile: Profile, layouts: Iterable[Partition], options: Options, schedule: str = AUTO,
    *, rearrange: Rearrange | None = None,
) -> ScheduleChoice:  # fmt: skip
    """Return the fastest choice; raises ScheduleError where the requested schedule runs on no layout.

    `rearrange` transforms every schedule into the form that the step needs; it raises where that is impossible.
    """
    best: ScheduleChoice | None = None
    tried: list[ScheduleChoice] = []
    refusals: list[GeminiError] = []
    memories = StageMemories(graph, profile, options.micro_batches, recompute=options.recompute)
    for partition in layouts:
        for found in _simulate_schedules(memories, partition, options, schedule, rearrange, refusals):
            tried.append(found)
            if best is not None and _lower_bound_ms(found) >= best.analysis.step_ms * (1 - _MIN_GAIN):
                break  # no schedule makes this layout faster
            if found.analysis.fits and (best is None or _is_faster(found, best)):
                best = found
        if best is not None and best.analysis.step_ms <= best.analysis.ideal_ms * (1 + _GOOD_ENOUGH):
            break  # no layout makes it much faster
    if best is None and tried:
        best = min(tried, key=lambda one: max(worker.memory.total_mb for worker in one.analysis.workers))
    if best is None:
        why = f": {str(refusals[0]).partition(chr(10))[0]}" if refusals else ""
        raise ScheduleError(
            f"{schedule} does not run on any layout of {graph.model_name} on these workers{why}\n"
            f"    → schedule='auto', or one of {', '.join(name for name in LIBRARY if name != schedule)}"
        )
    return (
        best if options.workers else replace(best, analysis=add_worker_memory(best.analysis, best.partition, memories))
    )


def _is_faster(one: ScheduleChoice, other: ScheduleChoice) -> bool:
    return one.analysis.step_ms < other.analysis.step_ms * (1 - _MIN_GAIN)


def _lower_bound_ms(found: ScheduleChoice) -> float:
    """Return the compute time of the busiest worker: no schedule is faster."""
    return max(worker.forward_ms + worker.backward_ms for worker in found.analysis.workers)


def _simulate_schedules(  # noqa: PLR0917
    memories: StageMemories, partition: Partition, options: Options, schedule: str, rearrange: Rearrange | None,
    refusals: list[GeminiError],
) -> Iterator[ScheduleChoice]:  # fmt: skip
    """Yield the simulated schedules of one layout; errors are appended to `refusals`."""
    for name in _schedule_names() if schedule == AUTO else [find_schedule(schedule)]:
        wanted = replace(options, schedule=name)
        try:
            found = analyse(memories.graph, memories.profile, partition, wanted)
            if rearrange is not None and found.plan is not None:
                plan = rearrange(found.plan)
                found = replace(found, plan=plan, step_ms=float(plan.nsteps))
        except GeminiError as error:
            refusals.append(error)
            continue
        if found.schedule == name and found.plan is not None:  # else the analysis shows another schedule
            timed = replace(found, step_ms=found.step_ms + step_overhead_ms(memories.graph))
            judged = add_worker_memory(timed, partition, memories) if options.workers else timed
            yield ScheduleChoice(partition, judged, found.plan, options.recompute)


def step_overhead_ms(graph: Graph) -> float:
    """Return the time of the controller before the first action of a step and after the last (ms)."""
    trained = sum(bool(parameter.requires_grad) for parameter in graph.bound_model().parameters())
    return _STEP_MS + _PARAMETER_MS * trained


def _schedule_names() -> list[str]:
    return [*(name for name in LIBRARY if name not in REPLICATED), COMPOSED]
