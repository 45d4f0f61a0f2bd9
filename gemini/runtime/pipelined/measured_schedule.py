"""Rehearsal: what a step is expected to take once some have run.

A plan is made from a profile of one process, with what probes say of workers beside each other. What actions take in
the workers, in their caches, on their cores, is known after a step. The same orders with those times say how long the
next one takes, but for what steps took longer than that: waiting for messages, for micro-batches that differ, for a
loss on the whole batch and for the program's own process. The first step is not warm; the last few count, for a
machine's speed changes. All that is worked out when somebody asks: steps do not wait for it. Only after the ninth, the
seventeenth and so on is looked whether a worker has more to do than the others; where steps have lost more by that than
planning takes, the plan is to be made again (`planner.experience`).
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini.planner.replan import imbalance_ms
from gemini.planner.step_plan import MeasuredSteps
from gemini.runtime.pipelined.step_request import decode_events
from gemini.schedule.block import LETTERS
from gemini.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.step_request import ExecutedStep, TraceEvent
    from gemini.schedule.schedplan import SchedPlan

Spans = dict[tuple[int, str], float]  # ms, by stage and type of action
TYPES = {letter: btype for btype, letter in LETTERS.items()} | {btype: btype for btype in LETTERS}  # of events
_LAST = 8  # steps
_MUCH = 0.05  # of a step, lost by workers that wait for one that is busy for longer than planned


class ScheduleTimings:
    """The steps of one plan."""

    def __init__(self) -> None:
        self.count = 0  # of steps
        self.last_ms = 0.0  # what the last one took
        self.is_due = False  # to make the plan again: its steps have lost more than that takes
        self._last: deque[tuple[list[tuple[int, bytes]], float]] = deque(maxlen=_LAST)  # told, and how long it took
        self._known: tuple[int, MeasuredSteps] | None = None  # after how many steps, and what was expected then

    def add(self, plan: StepPlan, ran: ExecutedStep, step_ms: float, planning_ms: float) -> None:
        """One more has run, by a plan that it would take so long to make again."""
        self.count, self.last_ms = self.count + 1, step_ms
        if self.count == 1:
            return
        self._last.append((ran.worker_traces, step_ms))
        before = self.count - 1
        if len(self._last) == _LAST and not before & (before - 1):
            found = self.apply_to(plan)
            lost = imbalance_ms(found)
            self.is_due = lost > _MUCH * found.step_ms and lost * self.count > planning_ms

    def apply_to(self, plan: StepPlan) -> StepPlan:
        """The plan with what is expected of its next step now."""
        if not self._last:
            return plan
        if self._known is None or self._known[0] != self.count:
            steps = [(decode_events(told), ms) for told, ms in self._last]
            self._known = self.count, predict_from_steps(plan.schedule, steps)
        return replace(plan, measured=self._known[1])


def predict_from_steps(plan: SchedPlan, steps: list[tuple[list[TraceEvent], float]]) -> MeasuredSteps:
    """The same orders, with actions as long as they were in these steps: what workers did, and the step (ms)."""
    spans = [mean_spans(events) for events, _ in steps]
    rest = statistics.median(ms - float(_run(plan, one).makespan) for one, (_, ms) in zip(spans, steps, strict=True))
    found = _run(plan, _median_spans(spans))
    return MeasuredSteps(found.executed(), float(found.makespan) + rest, len(steps))


def _run(plan: SchedPlan, spans: Spans) -> Simulation:
    """The orders of a plan, with actions that take so long; stages of its replicas are those of the model."""
    count = 1 + max((stage for stage, _ in spans), default=0)
    return simulate(plan, spans=lambda block: spans.get(((block.stage or 0) % count, block.btype), block.span))


def mean_spans(events: list[TraceEvent]) -> Spans:
    """What actions took in a step: the mean of all micro-batches, whose sum a worker is busy for."""
    took: dict[tuple[int, str], list[float]] = {}
    for event in events:
        if event.kind in TYPES:
            took.setdefault((event.stage, TYPES[event.kind]), []).append((event.end - event.begin) * 1e3)
    return {key: max(statistics.fmean(found), 1e-6) for key, found in took.items()}


def _median_spans(steps: list[Spans]) -> Spans:
    """The median of some steps."""
    return {key: statistics.median(one[key] for one in steps if key in one) for key in set().union(*steps)}
