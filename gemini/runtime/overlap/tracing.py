"""Tracing: what workers say they did in a step, as the report takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemini.planner.step_plan import StepPlan
from gemini.report.step_trace import Ran, StepTrace, executed
from gemini.runtime.executor.request import Event
from gemini.schedule.block import LETTERS, Action

_TYPES = {letter: btype for btype, letter in LETTERS.items()} | {btype: btype for btype in LETTERS}


def save_trace(folder: Path, plan: StepPlan, events: Sequence[Event], step_ms: float) -> list[Path]:
    """Write the timeline of a step beside its plan."""
    return trace_of(plan, events, step_ms).save(folder)


def trace_of(plan: StepPlan, events: Sequence[Event], step_ms: float) -> StepTrace:
    """The timeline of a step beside its plan."""
    done = [event for event in events if event.kind in _TYPES]
    first = min(event.begin for event in done)
    ran = [
        Ran(
            event.worker,
            Action(event.stage, _TYPES[event.kind], event.mid),
            (event.begin - first) * 1e3,
            (event.end - first) * 1e3,
        )
        for event in done
    ]
    return StepTrace(plan.schedule, executed(plan.schedule, ran), step_ms, plan.step_ms)
