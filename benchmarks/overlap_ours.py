"""Gemini's side of the overlap benchmark: the default plan, and plans selected by name.

The model is compiled with `schedule="auto"` and called as a program calls it; the other plans are made on the same
profile and replace the first in the same workers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from overlap_peers import Task, pin
from overlap_progress import PROGRESS

from gemini import GeminiCompiler, GeminiConfig
from gemini.planner.contention import measure_contention
from gemini.planner.plan_request import PlanRequest
from gemini.planner.schedule_choice import choose_schedule
from gemini.planner.stage_layouts import enumerate_layouts
from gemini.planner.step_plan import StepPlan
from gemini.runtime.interception import dispatch
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.step_request import ExecutedStep
from gemini.runtime.pipelined.step_trace import StepTrace, build_trace
from gemini.runtime.pool.worker_stats import measure_speeds

AUTO = "auto"
PLANS = ("1f1b", "zb_h1", "interleaved_1f1b", "zb_v", "composed")


@dataclass(frozen=True)
class Took:
    """A step: what its caller waited for; of that, in which no worker had begun or all had ended; and what the caller's
    own thread computed from the call of the model to the end of backward."""

    seconds: float
    outside: float
    computed: float
    trace: StepTrace


class Ours:
    """A model in workers, by several plans."""

    def __init__(self, task: Task, seats: list[list[int]], folder: Path) -> None:
        self.task = task
        self.model, self.batch, self.targets = task.made()
        config = GeminiConfig(
            mode="pipeline", pipeline_degree=task.workers, accum_degree=task.micro_batches, quiet=True,
            run_folder=str(folder / f"{task.name}-{task.workers}"),
        )  # fmt: skip
        began = time.perf_counter()
        GeminiCompiler().compiler(self.model, config)
        managed = dispatch.find_managed(self.model)
        if managed is None or managed.pipelined is None:
            raise RuntimeError("the model is not managed")
        self.overlap, self.pool = managed.pipelined, managed.pool
        self.overlap._trace = self._keep  # type: ignore[method-assign]
        self._last: ExecutedStep | None = None
        for worker, seat in zip(self.pool.workers, seats, strict=True):
            pin(worker.process.pid, seat)
        for what in ("a call that is watched", "a call that is planned for"):
            PROGRESS.tell(what)
            self.model(self.batch)
        self.ready_s = time.perf_counter() - began
        self.contention = measure_contention(task.workers, measure_speeds=partial(measure_speeds, self.pool))
        ((self.key, (kind,)),) = self.overlap.plans.kinds.items()
        if kind.plan is None:
            raise RuntimeError(f"no plan: {kind.reason}")
        self.kinds: dict[str, CallKind] = {AUTO: kind}
        self._layouts: list[Any] | None = None

    def plan(self, name: str) -> None:
        """Make the plan with a schedule; raises GeminiError where there is none."""
        first = self.of(AUTO)
        pieces = self.task.micro_batches
        options = PlanRequest(self.task.workers, pieces).options(pieces, pieces)  # sizes are of a micro-batch
        if self._layouts is None:
            self._layouts = list(enumerate_layouts(first.graph, first.profile, self.task.workers, "exact", options))
        choice = choose_schedule(first.graph, first.profile, self._layouts, options, name)
        plan = replace(  # these models draw no random numbers
            first,
            partition=choice.partition,
            analysis=choice.analysis,
            schedule=choice.plan,
            name=name,
            rng_patterns=((),) * choice.partition.nstages,
            _built={},
        )
        kind = CallKind(plan, "", self.kinds[AUTO].shapes)
        kind.output_specs = dict(self.kinds[AUTO].output_specs)
        self.kinds[name] = kind

    def of(self, name: str) -> StepPlan:
        """A plan."""
        plan = self.kinds[name].plan
        if plan is None:
            raise RuntimeError(self.kinds[name].reason)
        return plan

    def step(self, name: str) -> Took:
        """A step by a plan, as a program takes it."""
        self.overlap.plans.kinds[self.key][:] = [self.kinds[name]]  # in place: the list is known elsewhere
        self._last = None
        plan = self.kinds[name].timings.apply_to(self.of(name))
        begin = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        before = time.thread_time()
        loss = self.task.work.loss(self.model(self.batch), self.targets)
        loss.backward()
        seconds, computed = time.perf_counter() - begin, time.thread_time() - before
        if self._last is None:
            raise RuntimeError(f"not overlapped: {'; '.join(self.overlap.journal.reasons)}")
        events = self._last.trace
        first, last = min(event.begin for event in events), max(event.end for event in events)
        return Took(seconds, seconds - (last - first), computed, build_trace(plan, events, seconds * 1e3))

    def save(self, name: str, folder: Path) -> list[Path]:
        """The trace of one more step, and its picture."""
        return self.step(name).trace.save(folder)

    def _keep(self, _kind: CallKind, ran: Any, _step_ms: float) -> None:
        self._last = ran

    @property
    def pids(self) -> list[int]:
        """Its workers."""
        return [worker.process.pid for worker in self.pool.workers]

    def end(self) -> None:
        """Let them leave."""
        self.pool.stop()
