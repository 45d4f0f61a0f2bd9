"""Tracing: what workers say they did in a step, as the report takes it."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.planner.step_plan import StepPlan
from gemini.report.step_trace import Ran, StepTrace, executed
from gemini.runtime.pipelined.measured_schedule import TYPES
from gemini.runtime.pipelined.step_request import Event
from gemini.schedule.block import Action
from gemini.schedule.user_plan import replicas


def trace_of(plan: StepPlan, events: Sequence[Event], step_ms: float, peak_mb: tuple[float, ...] = ()) -> StepTrace:
    """The timeline of a step beside what was expected of it; `peak_mb` is what each worker had, where that is known."""
    done = [event for event in events if event.kind in TYPES]
    first = min(event.begin for event in done)
    copies = replicas(plan.schedule)  # whose micro-batches are several of ours, one through each
    ran = [
        Ran(
            event.worker,
            Action(event.stage + event.mid % copies * plan.nstages, TYPES[event.kind], event.mid // copies),
            (event.begin - first) * 1e3,
            (event.end - first) * 1e3,
        )
        for event in done
    ]
    profiled_ms = 0.0 if plan.rehearsed is None else plan.analysis.step_ms
    measured = executed(plan.schedule, ran)
    expected_mb = tuple(one.memory.total_mb - one.memory.optimizer_mb for one in plan.analysis.workers)
    return StepTrace(plan.expected, measured, step_ms, plan.step_ms, peak_mb, expected_mb, profiled_ms)
