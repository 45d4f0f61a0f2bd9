"""Auto policy: starts workers for a model where they make its steps faster, and never costs much to find out.

    calls 1 to 3       the first is a warm-up, two are timed in this process; a short step stays local
    from call 13 on    as soon as the next phase fits into the time that Gemini may take (`own_time`), and the steps
                       so far would have repaid it:
        bound          a step that workers cannot speed up stays local (`speedup_bound`)
        plan           the step is captured, profiled and planned as a pipeline
        search         the search of `gemini tune` compares pipelines, shards, replicas and their combinations by these
                       costs; where it prefers another than the planned one, that one is planned, as a phase of its own
                       the model stays local where the plan is not faster
        workers        start, and run the plan
    after 10 steps     by the plan: if they are slower than those in this process were, the model runs locally again

Between the phases all calls run in this process. That a model stays local is remembered for later runs on this machine
(`auto_verdicts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.launcher.auto_verdicts import Verdicts
from gemini.launcher.model_discovery import ReplacementCall
from gemini.launcher.own_time import OwnTime
from gemini.launcher.policy import ForcedPolicy
from gemini.planner.step_plan import UnplannableError

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.pipelined_model import PipelinedModel

_COLD, _TIMED = 1, 2  # calls
_UNTOUCHED = 12  # calls: a run as short as this never gets workers
_COMPARED = 10  # steps by a plan, after which they are compared with local ones
_PLAN_S, _PLAN_STEPS = 1.5, 8.0  # time of planning: imports, and runs of the model
_WORKER_S = 2.0  # processor time of a worker until its first step
_SHORTEST_STEP_MS = 20.0  # no speedup below this: messages and wake-ups cost milliseconds
_ONE_WORKER = {
    True: "one worker is requested, which is not faster than this process (request two: --workers 2)",
    False: "this machine has one core and no further devices",
}
_SMALLEST_SPEEDUP = 1.1  # a smaller speedup is not worth the memory of workers


class TrialClock:
    """Time that a step takes if nothing else runs on the machine.

    On a CPU it is the calling thread's CPU time: that thread takes part in every operator, and time spent waiting for a
    core does not count. With CUDA, backward runs on other threads: there it is the process's CPU time, at most the
    wall-clock time.
    """

    def __init__(self) -> None:
        self.own = time.process_time if torch.cuda.is_initialized() else time.thread_time
        self.wall, self.cpu = time.perf_counter(), self.own()

    def ms(self) -> float:
        """Return the elapsed milliseconds."""
        return min(self.wall_ms(), (self.own() - self.cpu) * 1e3)

    def wall_ms(self) -> float:
        """Return the milliseconds of the wall clock."""
        return (time.perf_counter() - self.wall) * 1e3


@dataclass
class Trial:
    """Times of the first calls of a model, and what is known about it so far."""

    calls: int = 0
    ms: float = 0.0  # of the timed calls, including backward
    wall_ms: float = 0.0
    least_ms: float | None = None  # the shortest possible step with workers
    first: StepPlan | None = None  # of a pipeline, whose costs the search uses
    plan: StepPlan | None = None
    planning_ms: float = 0.0
    config: GeminiConfig | None = None  # that the search has chosen
    choice: list[str] = field(default_factory=list)  # what it compared

    def add(self, clock: TrialClock) -> None:
        """Add time of the model's forward, or of backward after it."""
        if self.calls > _COLD:
            self.ms += clock.ms()
            self.wall_ms += clock.wall_ms()

    @property
    def step_ms(self) -> float:
        """Forward and backward time of one call."""
        return self.ms / max(self.calls - _COLD, 1)

    @property
    def step_wall_ms(self) -> float:
        """The same with the time that other programs took."""
        return self.wall_ms / max(self.calls - _COLD, 1)

    def estimate_s(self, workers: int) -> float:
        """Return the processor time of the next phase."""
        step_s = self.step_ms / 1e3
        if self.plan is not None:
            return workers * _WORKER_S + 4 * step_s  # some steps run twice, to compare them
        return 2 * step_s if self.least_ms is None else _PLAN_S + _PLAN_STEPS * step_s

    def has_repaid(self, estimate_s: float) -> bool:
        """Return whether the calls so far would have repaid a phase: as many may follow."""
        with_workers = self.plan.step_ms if self.plan is not None else self.least_ms or 0.0
        return self.calls * (self.step_ms - with_workers) / 1e3 >= estimate_s


class AutoPolicy(ForcedPolicy):
    """Starts workers for models whose planned step is faster than the measured one."""

    is_lasting = False

    def __init__(self, config: GeminiConfig, micro_batches: int | None = None) -> None:
        super().__init__(config)
        self._micro_batches = micro_batches  # that the user requested
        self._trials: dict[int, Trial] = {}
        self._backward: Callable[..., Any] | None = None
        self._wall_ms: dict[int, float] = {}  # steps of models that get workers, in this process
        self.own_time, self.verdicts = OwnTime(), Verdicts(config)

    def refuses_compiled(self, model: nn.Module) -> bool:
        """Always refuse: compiled steps are faster than the timed ones, and workers do not run compiled code."""
        self.stay_local(model, "it is compiled by torch.compile (--mode pipeline uses workers)")
        return True

    def decide(self, model: nn.Module) -> ReplacementCall | bool | None:
        """Time the first calls; decide on the next one."""
        if count_workers(self.config) < 2:
            return self.stay_local(model, _ONE_WORKER[self.config.workers == 1])
        trial = self._trials.setdefault(id(model), Trial())
        if trial.calls >= _COLD + _TIMED and trial.step_ms < _SHORTEST_STEP_MS:
            self._end_trial(model)
            return self.stay_local(model, f"a step of {trial.step_ms:.2g} ms is too short for workers to speed up")
        self._time_backward()
        if trial.calls > _UNTOUCHED and self._may_begin(trial):
            return lambda *args, **kwargs: self._call_examined(model, trial, args, kwargs)
        return lambda *args, **kwargs: self._call_timed(model, trial, args, kwargs)

    def _may_begin(self, trial: Trial) -> bool:
        """Return whether the next phase fits into the time that it may take, and is likely to repay."""
        estimate_s = trial.estimate_s(count_workers(self.config))
        return self.own_time.fits(estimate_s) and trial.has_repaid(estimate_s)

    def _call_timed(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> Any:
        self.discovery.pass_over(model)
        trial.calls += 1
        clock = TrialClock()
        try:
            return self.discovery.call(model, args, kwargs)
        finally:
            trial.add(clock)

    def _call_examined(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> Any:
        """Run the next phase for a model, then the call."""
        with self.own_time.measure():
            verdict = self._examine(model, trial, args, kwargs)
        if verdict is None:
            return self._call_timed(model, trial, args, kwargs)
        self._end_trial(model)
        self.discovery.settle(model, managed=verdict)
        return nn.Module.__call__(model, *args, **kwargs)

    def _end_trial(self, model: nn.Module) -> None:
        del self._trials[id(model)]
        self._restore_backward()

    def _examine(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> bool | None:
        """Return whether a model gets workers; None where that is not known after this phase."""
        from gemini.purity.proof import find_impure_argument, prove_purity

        if trial.plan is not None:
            self.own_time.add(count_workers(self.config) * _WORKER_S)
            self._wall_ms[id(model)] = trial.step_wall_ms
            return self.start(model, trial.plan, trial.step_ms, trial.planning_ms, trial.config, trial.choice)
        if trial.least_ms is None and (reason := self.verdicts.find(model, trial.step_ms)):
            return self.stay_local(model, reason)
        if reason := prove_purity(model).reason or find_impure_argument((args, kwargs), model):
            return self._keep_local(model, trial, reason)  # nothing may run it on trial
        self.discovery.stop_watching()
        try:
            return self._bound(model, trial, args, kwargs) if trial.least_ms is None else self._plan_trial(
                model, trial, args, kwargs
            )  # fmt: skip
        except Exception as error:
            if self.config.strict:
                raise
            return self._keep_local(model, trial, str(error) or type(error).__name__)
        finally:
            self.discovery.resume()

    def _bound(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> bool | None:
        trial.least_ms = self._bound_ms(model, trial, args, kwargs)
        if trial.least_ms * _SMALLEST_SPEEDUP > trial.step_ms:
            return self._stay_local(model, trial, f"at best {trial.least_ms:.0f} ms")
        return None

    def _plan_trial(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> bool | None:
        began = time.perf_counter()
        is_first = trial.config is None
        try:
            plan = self._plan(model, args, kwargs, trial.step_ms, trial.config or self.config)
            if trial.first is not None and plan.unsharded_reason:
                raise UnplannableError(plan.unsharded_reason)
        except UnplannableError as error:
            if trial.first is None:
                raise
            reason = str(error).partition("\n")[0]
            trial.choice = [*trial.choice, f"{trial.config.mode if trial.config else ''} has no plan: {reason}"]
            plan, trial.config = trial.first, self.config
        if is_first:
            trial.first, trial.config = plan, self._search(plan, trial)
        trial.planning_ms += (time.perf_counter() - began) * 1e3
        if is_first and trial.config != self.config:
            return None  # the plan of the choice is the next phase
        trial.plan = plan
        if plan.step_ms * _SMALLEST_SPEEDUP > trial.step_ms:
            return self._stay_local(model, trial, f"{plan.step_ms:.0f} ms")
        return None

    def _search(self, plan: StepPlan, trial: Trial) -> GeminiConfig:
        """Return the configuration that the search of `gemini tune` prefers, by the costs of a first plan."""
        from gemini.tune.machine_search import choose_for_run

        if plan.tail is not None or plan.program is not None or self.config.schedule.endswith(".json"):
            return self.config  # only a pipeline can run it
        config, trial.choice = choose_for_run(plan, self.config, trial.step_ms / 1e3, self._micro_batches)
        return config

    def _bound_ms(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> float:
        from gemini.launcher.speedup_bound import shortest_step_ms

        return shortest_step_ms(model, args, kwargs, trial.step_ms, count_workers(self.config))

    def _plan(self, model: nn.Module, args: Any, kwargs: Any, single_ms: float, config: GeminiConfig) -> StepPlan:
        from gemini.capture.module_hooks import without_hooks
        from gemini.runtime.local_mode import run_locally
        from gemini.snapshot.rng_snapshot import preserve_rng_state

        planner = self.planner(config)
        assert planner is not None
        with run_locally(), without_hooks(model), preserve_rng_state():
            deadline = time.process_time() + self.own_time.seconds_left()
            return planner(model, args, kwargs, local_step_ms=single_ms, deadline_s=deadline)

    def _stay_local(self, model: nn.Module, trial: Trial, taken: str) -> bool:
        by = f" ({trial.choice[0].partition(':')[0]})" if trial.choice else ""
        return self._keep_local(
            model,
            trial,
            f"{count_workers(self.config)} workers would take {taken} per step{by}, "
            f"this process takes {trial.step_ms:.0f} ms (--mode pipeline uses workers anyway)",
        )

    def _keep_local(self, model: nn.Module, trial: Trial, reason: str) -> bool:
        """Keep a model local, in later runs too."""
        self.verdicts.store(model, trial.step_ms, reason)
        return self.stay_local(model, reason)

    def _observe(self, model: nn.Module, pipelined: PipelinedModel, single_ms: float | None) -> None:
        """Print the plan of the first pipelined step, and give up workers that are slower than this process was."""
        super()._observe(model, pipelined, single_ms)
        local_ms, taken = self._wall_ms.pop(id(model)), list[float]()
        pipelined.journal.local_ms = local_ms

        def compare(step_ms: float) -> None:
            taken.append(step_ms)
            if len(taken) != _COMPARED:
                return
            pipelined.plans.on_step = None
            usual = sorted(taken)[_COMPARED // 2]
            if usual > local_ms:
                pipelined.managed.give_up(
                    f"its steps take {usual:.0f} ms in workers, {local_ms:.0f} ms in this process"
                )

        pipelined.plans.on_step = compare

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _time_backward(self) -> None:
        if self._backward is not None:
            return
        backward = self._backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock = TrialClock()
            try:
                return backward(*args, **kwargs)
            finally:
                for trial in self._trials.values():
                    trial.add(clock)

        torch.autograd.backward = timed

    def _restore_backward(self) -> None:
        if self._backward is not None and not self._trials:
            torch.autograd.backward, self._backward = self._backward, None


def count_workers(config: GeminiConfig) -> int:
    """Return the number of workers for a configuration that does not set one."""
    from gemini.launcher.defaults import count_devices

    return min(count_devices(), config.pipeline_degree or 1)
