"""Rounds: a pass over the nodes, then a whole step, and again; so both meet the same state of the machine.

    survey │ pass │ step │ pass │ step │ …

A device that runs behind the calling thread first has one pass more, from which it learns how long that thread takes.
Where steps wait for the thread, that is read too, in turn with more steps.
Where the model or a step does not fit on the device, passes go over single nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from gemini.profiling.graph_walk import Walk
from gemini.profiling.host_time import ThreadRun
from gemini.profiling.measured_device import Device, Stopwatch, is_out_of_memory
from gemini.profiling.node_classes import NodeClass, Survey
from gemini.profiling.node_timer import NodePass, Pass, PassReading, StepPass, no_garbage_collection
from gemini.profiling.preserved_model import Unchanged
from gemini.profiling.reading_statistics import ClassTimes, Readings, as_in_steps, class_times
from gemini.profiling.whole_step import Step

if TYPE_CHECKING:
    from gemini.profiling.profiler import Profiling

THREAD_RUNS, MOST_THREAD_RUNS, THREAD_MS = 4, 16, 600.0  # where the thread is the limit
_WAITS = 0.1  # a step waits for the thread if at its end the thread waits no longer than this share for the device


class Rounds:
    """Measures classes of nodes on a device, and whole steps beside them."""

    def __init__(self, job: Profiling, device: Device, pending: list[NodeClass], state: Unchanged) -> None:
        self.job, self.device, self.pending, self.state = job, device, pending, state
        self.of = {member: found for found in pending for member in found.members}
        # The device's own times hardly vary where another thread has no part in them.
        self.least = 1 if device.runs_behind else 2
        self.passes: list[PassReading] = []
        self.steps: list[float] = []
        self.threads: list[Readings] = []
        self.earlier: Stopwatch | None = None
        self.step = Step(job.graph, device, job.inputs, job.call)
        self.notes: tuple[str, ...] = ()
        away = job.away(device)
        self.whole = not away  # whether the model can run a step here
        self.unchecked = f"the model is on {away}, not on {device.torch_device}" if away else ""
        if not job.check:
            self.unchecked = "not asked for"

    def survey(self) -> None:
        """Find out the work and memory of every class."""
        walk = Walk(self.job.graph, self.job.inputs, self.device.torch_device)
        Survey(self.job.flow, self.pending, self.state).survey(walk, self.device)

    def round(self, turn: int) -> None:
        """One pass and one step."""
        if self.pending:
            if self.device.runs_behind and self.earlier is None:
                self._pass(turn).gradients.clear()
            self.passes.append(self._pass(turn))
        if self._can_step:
            self._steps(2 if self.device.runs_behind else 1)
            if self.is_limited_by_thread and self.is_complete:
                self._with_memory(self._thread_runs)

    @property
    def _can_step(self) -> bool:
        return self.job.check and self.whole

    def _pass(self, turn: int) -> PassReading:
        """One pass. The gradients of the step before go just before it, as a training loop drops them."""
        job = self.job
        self.step.drop()
        given = (job.flow, job.inputs, self.device, self.of, self.earlier)
        if self.whole:
            try:
                return self._taken(StepPass(*given))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._does_not_fit()
        return self._taken(NodePass(*given, turn=turn))

    def _taken(self, run: Pass) -> PassReading:
        reading = run.measure()
        self.earlier = reading.stopwatch
        for one in self.passes[-1:]:
            one.gradients.clear()
        return reading

    def _steps(self, count: int) -> None:
        if self.passes:
            self.passes[-1].gradients.clear()

        def run() -> None:
            for _ in range(count):
                self.steps.append(self.step.run())

        self._with_memory(run)

    def _with_memory(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._does_not_fit()

    def _thread_runs(self) -> None:
        """Steps and runs of the graph in one piece, in turn; for a while, as processors are slow for a while."""
        job, begin, count = self.job, self.device.now_ms(), 0
        while count < THREAD_RUNS or (count < MOST_THREAD_RUNS and self.device.now_ms() - begin < THREAD_MS):
            count += 1
            self.steps += [self.step.run(), self.step.run()]
            self.step.drop()
            run = ThreadRun(job.graph, job.inputs, self.device.torch_device)
            try:
                with no_garbage_collection():
                    self.threads.append(run.measure())
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.threads.clear()  # a graph that does not run in one piece: then passes must do
                return
            finally:
                self.step.drop()

    def _does_not_fit(self) -> None:
        """From now on nodes run one at a time; what was read is dropped, so that all times are of one kind."""
        self.step.drop()
        self.device.release()
        self.whole = False
        self.steps, self.passes, self.threads, self.earlier = [], [], [], None
        self.step.forget()
        self.unchecked = f"a whole step does not fit on {self.device.torch_device}"
        self.notes = ("nodes were measured one at a time, as a whole step does not fit",)

    # ── what was read ──────────────────────────────────────────────────────────────────────────────────────────
    def times(self) -> dict[str, ClassTimes]:
        """The times of all classes, by signature."""
        found = class_times(self.passes, self.pending, self.threads)
        if not (self.device.runs_behind and self.is_complete):
            return found
        counts = {one.signature: len(one.members) for one in self.pending}
        return as_in_steps(found, counts, self.step.host_ms, is_limit=self.is_limited_by_thread)

    @property
    def is_complete(self) -> bool:
        """Whether all nodes are measured, none known from before."""
        return len(self.of) == len(self.job.signatures)

    @property
    def is_limited_by_thread(self) -> bool:
        """Whether steps wait for the calling thread, and not the thread for the device."""
        shares = [wait / ms for wait, ms in zip(self.step.waits_ms, self.steps, strict=False) if ms]
        return self.device.runs_behind and bool(shares) and statistics.median(shares) < _WAITS

    def step_ms(self) -> float:
        """A step that nothing disturbs, as the times of nodes are free of disturbances: of the quickest forward and the
        quickest backward. Where the calling thread runs ahead of a device, only whole steps can be told apart."""
        if not self.steps or (self.device.runs_behind and not self.is_limited_by_thread):
            return min(self.steps, default=0.0)
        forward, backward = zip(*self.step.host_ms, strict=True)
        return float(min(forward) + min(backward) + statistics.median(self.step.waits_ms))

    def noise(self) -> float:
        """The noise of all classes, weighted by time."""
        total = weighted = 0.0
        found = self.times() if self.passes else {}
        for one in self.pending:
            if one.signature in found:
                times = found[one.signature]
                ms = (times.forward.ms + times.backward.ms) * len(one.members)
                total, weighted = total + ms, weighted + ms * times.noise
        return weighted / total if total else 0.0


STEPS = 8.0
NOISY_STEPS = 9.0  # where readings differ much
LEAST_MS = 50.0  # where a step takes next to nothing


class Budget:
    """The time from its making, on the clock of a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.begin = self.round = device.now_ms()
        self.step_ms = 0.0  # as far as known

    def begin_round(self) -> None:
        """A round starts."""
        self.round = self.device.now_ms()

    def allows_round(self, noisy: bool) -> bool:
        """Whether one more like the last fits; always where no step was timed, as no limit is known."""
        now = self.device.now_ms()
        limit = max(LEAST_MS, (NOISY_STEPS if noisy else STEPS) * self.step_ms)
        return not self.step_ms or now - self.begin + (now - self.round) <= limit
