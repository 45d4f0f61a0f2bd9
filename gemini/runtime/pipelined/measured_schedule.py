"""Measured schedule: the predicted duration of a step once some have run.

A plan is made from a profile of one process, with probes of workers beside each other. The durations of actions in the
workers, with their caches and cores, are known after a step. The same orders with those durations predict the next
step, plus the time that steps took beyond that: waiting for messages, uneven micro-batches, a loss on the whole batch,
the controller. The first step is not warm; the last few count, as the speed of a machine changes. Predictions are
computed on demand. Only after the 9th, 17th, 33rd … step the balance of the workers is checked; where steps have lost
more by imbalance than planning takes, the plan is made again (`gemini.planner.replan`).
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
_MUCH = 0.05  # of a step, lost to imbalance


class ScheduleTimings:
    """The durations of steps by one plan."""

    def __init__(self) -> None:
        self.count = 0  # of steps
        self.last_ms = 0.0  # of the last one
        self.is_due = False  # the plan should be made again
        self._last: deque[tuple[list[tuple[int, bytes]], float]] = deque(maxlen=_LAST)  # worker events, duration
        self._known: tuple[int, MeasuredSteps] | None = None  # number of steps, and the prediction at that time

    def add(self, plan: StepPlan, ran: ExecutedStep, step_ms: float, planning_ms: float) -> None:
        """Record a step; `planning_ms` is the time to make the plan again."""
        self.count, self.last_ms = self.count + 1, step_ms
        if self.count == 1:
            return
        self._last.append((ran.worker_traces, step_ms))
        before = self.count - 1
        if len(self._last) == _LAST and not before & (before - 1):
            found = self.apply_to(plan)
            lost = imbalance_ms(found)
            self.is_due = lost > _MUCH * found.step_ms and lost * self.count > planning_ms

    def recent_steps(self) -> list[tuple[list[TraceEvent], float]]:
        """Return the events and durations of the last steps; empty before the second one."""
        return [(decode_events(traces), step_ms) for traces, step_ms in self._last]

    def apply_to(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the present prediction for its next step."""
        if not self._last:
            return plan
        if self._known is None or self._known[0] != self.count:
            self._known = self.count, predict_from_steps(plan.schedule, self.recent_steps())
        return replace(plan, measured=self._known[1])


def predict_from_steps(plan: SchedPlan, steps: list[tuple[list[TraceEvent], float]]) -> MeasuredSteps:
    """Simulate the same orders with the action durations of these steps: worker events, and step time in ms."""
    spans = [mean_spans(events) for events, _ in steps]
    rest = statistics.median(ms - float(_run(plan, one).makespan) for one, (_, ms) in zip(spans, steps, strict=True))
    found = _run(plan, _median_spans(spans))
    return MeasuredSteps(found.executed(), float(found.makespan) + rest, len(steps))


def _run(plan: SchedPlan, spans: Spans) -> Simulation:
    """Simulate the orders of a plan with these durations; stages of replicas are those of the model."""
    count = 1 + max((stage for stage, _ in spans), default=0)
    return simulate(plan, spans=lambda block: spans.get(((block.stage or 0) % count, block.btype), block.span))


def mean_spans(events: list[TraceEvent]) -> Spans:
    """Return the mean duration of each action over all micro-batches of a step."""
    took: dict[tuple[int, str], list[float]] = {}
    for event in events:
        if event.kind in TYPES:
            took.setdefault((event.stage, TYPES[event.kind]), []).append((event.end - event.begin) * 1e3)
    return {key: max(statistics.fmean(found), 1e-6) for key, found in took.items()}


def _median_spans(steps: list[Spans]) -> Spans:
    """Return the median over steps."""
    return {key: statistics.median(one[key] for one in steps if key in one) for key in set().union(*steps)}
