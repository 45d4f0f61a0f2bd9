"""Tracing: what workers say they did in a step, as the report takes it."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.planner.step_plan import StepPlan
from gemini.report.step_trace import Ran, StepTrace, executed
from gemini.runtime.executor.request import Event
from gemini.runtime.overlap.rehearsal import TYPES
from gemini.schedule.block import Action


def trace_of(plan: StepPlan, events: Sequence[Event], step_ms: float) -> StepTrace:
    """The timeline of a step beside what was expected of it."""
    done = [event for event in events if event.kind in TYPES]
    first = min(event.begin for event in done)
    ran = [
        Ran(
            event.worker,
            Action(event.stage, TYPES[event.kind], event.mid),
            (event.begin - first) * 1e3,
            (event.end - first) * 1e3,
        )
        for event in done
    ]
    profiled_ms = 0.0 if plan.rehearsed is None else plan.analysis.step_ms
    measured = executed(plan.schedule, ran)
    return StepTrace(plan.expected, measured, step_ms, plan.step_ms, profiled_ms=profiled_ms)
