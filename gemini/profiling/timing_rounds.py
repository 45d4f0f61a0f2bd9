"""Timing rounds: a pass over the nodes alternates with a whole step, so that both see the same machine state.

    survey │ pass │ step │ pass │ step │ …

An asynchronous device (CUDA) first has one more pass, which measures the launch times of the calling thread. Where
steps are bound by that thread, host times are measured, too, alternating with more steps. Where the model or a step
does not fit on the device, passes time single nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from gemini.profiling.graph_walk import GraphWalk
from gemini.profiling.host_time import HostTimeRun
from gemini.profiling.measured_device import Device, Stopwatch, is_out_of_memory
from gemini.profiling.node_classes import ClassSurvey, NodeClass
from gemini.profiling.node_timer import NodePass, PassTimes, StepPass, TimingPass, no_garbage_collection
from gemini.profiling.preserved_model import PreservedModel
from gemini.profiling.reading_statistics import ClassTimes, Readings, class_times, scale_to_steps
from gemini.profiling.whole_step import WholeStep

if TYPE_CHECKING:
    from gemini.profiling.profiler import Profiler

HOST_RUNS, MOST_HOST_RUNS, HOST_MS = 4, 16, 600.0  # host-bound steps
_WAITS = 0.1  # a step is host-bound if the thread waits for the device less than this share at its end


class TimingRounds:
    """Measures node classes and whole steps on a device."""

    def __init__(self, job: Profiler, device: Device, pending: list[NodeClass], state: PreservedModel) -> None:
        self.job, self.device, self.pending, self.state = job, device, pending, state
        self.class_of = {member: found for found in pending for member in found.members}
        # Times read on the device itself hardly vary.
        self.least = 1 if device.is_asynchronous else 2
        self.passes: list[PassTimes] = []
        self.steps: list[float] = []
        self.threads: list[Readings] = []
        self.earlier: Stopwatch | None = None
        self.step = WholeStep(job.graph, device, job.inputs, job.call)
        self.notes: tuple[str, ...] = ()
        other = job.other_device(device)
        self.whole = not other  # whether the model can run a whole step on the device
        self.unchecked = f"the model is on {other}, not on {device.torch_device}" if other else ""
        if not job.check:
            self.unchecked = "not requested"

    def survey(self) -> None:
        """Count the work and memory of every class."""
        walk = GraphWalk(self.job.graph, self.job.inputs, self.device.torch_device)
        ClassSurvey(self.job.flow, self.pending, self.state).survey(walk, self.device)

    def round(self, turn: int) -> None:
        """Run one pass and one step."""
        if self.pending:
            if self.device.is_asynchronous and self.earlier is None:
                self._pass(turn).gradients.clear()
            self.passes.append(self._pass(turn))
        if self._can_step:
            self._steps(2 if self.device.is_asynchronous else 1)
            if self.is_host_bound and self.is_complete:
                self._guard_memory(self._run_host_times)

    @property
    def _can_step(self) -> bool:
        return self.job.check and self.whole

    def _pass(self, turn: int) -> PassTimes:
        """Run one pass, after dropping the gradients of the previous step as a training loop does."""
        job = self.job
        self.step.drop()
        arguments = (job.flow, job.inputs, self.device, self.class_of, self.earlier)
        if self.whole:
            try:
                return self._measure_pass(StepPass(*arguments))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._switch_to_single_nodes()
        return self._measure_pass(NodePass(*arguments, turn=turn))

    def _measure_pass(self, run: TimingPass) -> PassTimes:
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

        self._guard_memory(run)

    def _guard_memory(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._switch_to_single_nodes()

    def _run_host_times(self) -> None:
        """Alternate steps and host-timed runs of the graph long enough to average over slow phases of the processor."""
        job, begin, count = self.job, self.device.now_ms(), 0
        while count < HOST_RUNS or (count < MOST_HOST_RUNS and self.device.now_ms() - begin < HOST_MS):
            count += 1
            self.steps += [self.step.run(), self.step.run()]
            self.step.drop()
            run = HostTimeRun(job.graph, job.inputs, self.device.torch_device)
            try:
                with no_garbage_collection():
                    self.threads.append(run.measure())
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.threads.clear()  # a graph that does not run as a whole: use the times of passes
                return
            finally:
                self.step.drop()

    def _switch_to_single_nodes(self) -> None:
        """Time single nodes in later passes; drop previous readings, so that all times are of one kind."""
        self.step.drop()
        self.device.release()
        self.whole = False
        self.steps, self.passes, self.threads, self.earlier = [], [], [], None
        self.step.discard_readings()
        self.unchecked = f"a whole step does not fit on {self.device.torch_device}"
        self.notes = ("nodes were measured one at a time, since a whole step does not fit",)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def times(self) -> dict[str, ClassTimes]:
        """Return the times of all classes, by signature."""
        found = class_times(self.passes, self.pending, self.threads)
        if not (self.device.is_asynchronous and self.is_complete):
            return found
        counts = {one.signature: len(one.members) for one in self.pending}
        return scale_to_steps(found, counts, self.step.host_ms, is_limit=self.is_host_bound)

    @property
    def is_complete(self) -> bool:
        """Whether all nodes are measured in this run, none read from the cache."""
        return len(self.class_of) == len(self.job.signatures)

    @property
    def is_host_bound(self) -> bool:
        """Whether steps are bound by the calling thread, not by the device."""
        shares = [wait / ms for wait, ms in zip(self.step.waits_ms, self.steps, strict=False) if ms]
        return self.device.is_asynchronous and bool(shares) and statistics.median(shares) < _WAITS

    def step_ms(self) -> float:
        """Return the undisturbed step time, comparable with node times: the fastest forward plus the fastest backward,
        or the fastest whole step where the calling thread runs ahead of the device."""
        if not self.steps or (self.device.is_asynchronous and not self.is_host_bound):
            return min(self.steps, default=0.0)
        forward, backward = zip(*self.step.host_ms, strict=True)
        return float(min(forward) + min(backward) + statistics.median(self.step.waits_ms))

    def noise(self) -> float:
        """Return the time-weighted noise of all classes."""
        total = weighted = 0.0
        found = self.times() if self.passes else {}
        for one in self.pending:
            if one.signature in found:
                times = found[one.signature]
                ms = (times.forward.ms + times.backward.ms) * len(one.members)
                total, weighted = total + ms, weighted + ms * times.noise
        return weighted / total if total else 0.0


STEPS = 8.0
NOISY_STEPS = 9.0  # with noisy readings
LEAST_MS = 50.0  # for very short steps


class TimeBudget:
    """A limit on profiling time, in whole steps of the model, on the clock of a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.begin = self.round = device.now_ms()
        self.step_ms = 0.0  # 0 until a step was timed

    def begin_round(self) -> None:
        """Start timing a round."""
        self.round = self.device.now_ms()

    def allows_round(self, noisy: bool) -> bool:
        """Return whether another round of the last one's length fits; always true until a step was timed."""
        now = self.device.now_ms()
        limit = max(LEAST_MS, (NOISY_STEPS if noisy else STEPS) * self.step_ms)
        return not self.step_ms or now - self.begin + (now - self.round) <= limit
