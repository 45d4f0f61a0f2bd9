"""Tracing: what workers say they did in a step, as the report takes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemini.planner.step_plan import StepPlan
from gemini.report.rehearsal import rehearsed
from gemini.report.step_trace import Ran, StepTrace, executed
from gemini.runtime.executor.request import Event
from gemini.runtime.overlap.kinds import Kind
from gemini.schedule.block import LETTERS, Action

_TYPES = {letter: btype for btype, letter in LETTERS.items()} | {btype: btype for btype in LETTERS}


_SAVED = (3, 10)  # steps: once warm, and once more


class Tracing:
    """The first steps of a model, two of them to be looked at, beside their plans."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[int, list[StepTrace]] = {}  # by kind of step; the first of a kind is not warm

    def add(self, kind: Kind, number: int, events: Sequence[Event], step_ms: float) -> list[Path]:
        """A step has run, the so-and-so-many-eth of its model; the files written."""
        if number > max(_SAVED):
            return []
        assert kind.plan is not None
        seen = self._seen.setdefault(id(kind), [])
        seen.append(trace_of(kind.plan, events, step_ms))
        if number not in _SAVED:
            return []
        knows = len(seen) > 2 and kind.plan.tail is None  # what a tail takes is no action's time
        return (rehearsed(seen[1:]) if knows else seen[-1]).save(self.folder.parent / f"{self.folder.name}-{number}")


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
