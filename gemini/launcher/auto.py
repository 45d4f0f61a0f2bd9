"""Auto policy: starts workers for a model where they make its steps faster.

    first call         warm-up, not timed
    two calls          forward and backward are timed in this process, on all its threads
    next call          a short step stays local, and so does one that workers cannot speed up (see `speedup_bound`);
                       otherwise the step is planned, and workers start if the plan is faster

A model that stays local has no overhead from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.launcher.model_discovery import ReplacementCall
from gemini.launcher.policy import ForcedPolicy

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan

_COLD, _TIMED = 1, 2  # calls
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
        return min(time.perf_counter() - self.wall, self.own() - self.cpu) * 1e3


@dataclass
class Trial:
    """Times of the first calls of a model."""

    calls: int = 0
    ms: float = 0.0  # of the timed calls, including backward

    def add(self, ms: float) -> None:
        """Add time of the model's forward, or of backward after it."""
        if self.calls > _COLD:
            self.ms += ms

    @property
    def step_ms(self) -> float:
        """Forward and backward time of one call."""
        return self.ms / _TIMED


class AutoPolicy(ForcedPolicy):
    """Starts workers for models whose planned step is faster than the measured one."""

    is_lasting = False

    def __init__(self, config: GeminiConfig) -> None:
        super().__init__(config)
        self._trials: dict[int, Trial] = {}
        self._backward: Callable[..., Any] | None = None

    def refuses_compiled(self, model: nn.Module) -> bool:
        """Always refuse: compiled steps are faster than the timed ones, and workers do not run compiled code."""
        self.stay_local(model, "it is compiled by torch.compile (--mode pipeline uses workers)")
        return True

    def decide(self, model: nn.Module) -> ReplacementCall | bool | None:
        """Time the first calls; decide on the next one."""
        if count_workers(self.config) < 2:
            return self.stay_local(model, _ONE_WORKER[self.config.workers == 1])
        trial = self._trials.setdefault(id(model), Trial())
        if trial.calls < _COLD + _TIMED:
            self._time_backward()
            return lambda *args, **kwargs: self._call_timed(model, trial, args, kwargs)
        del self._trials[id(model)]
        self._restore_backward()
        if trial.step_ms < _SHORTEST_STEP_MS:
            return self.stay_local(model, f"a step of {trial.step_ms:.2g} ms is too short for workers to speed up")
        return lambda *args, **kwargs: self._call_planned(model, trial, args, kwargs)

    def _call_timed(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> Any:
        self.discovery.pass_over(model)
        trial.calls += 1
        clock = TrialClock()
        try:
            return self.discovery.call(model, args, kwargs)
        finally:
            trial.add(clock.ms())

    def _call_planned(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> Any:
        self.discovery.settle(model, managed=self._is_faster(model, trial, args, kwargs))
        return nn.Module.__call__(model, *args, **kwargs)

    def _is_faster(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> bool:
        from gemini.purity.proof import find_impure_argument, prove_purity

        single_ms = trial.step_ms
        if reason := prove_purity(model).reason or find_impure_argument((args, kwargs), model):
            return self.stay_local(model, reason)  # nothing may run it on trial
        self.discovery.stop_watching()
        try:
            least_ms = self._bound_ms(model, trial, args, kwargs)
            if least_ms * _SMALLEST_SPEEDUP > single_ms:
                self.discovery.resume()
                return self._stay_local(model, f"at best {least_ms:.0f} ms", single_ms)
            began = time.perf_counter()
            plan = self._plan(model, args, kwargs, single_ms)
            planning_ms = (time.perf_counter() - began) * 1e3
        except Exception as error:
            self.discovery.resume()
            if self.config.strict:
                raise
            return self.stay_local(model, str(error) or type(error).__name__)
        gain = single_ms / plan.step_ms if plan.step_ms else 0.0
        if gain < _SMALLEST_SPEEDUP:
            self.discovery.resume()
            return self._stay_local(model, f"{plan.step_ms:.0f} ms", single_ms)
        return self.start(model, plan, single_ms, planning_ms)

    def _bound_ms(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> float:
        from gemini.launcher.speedup_bound import shortest_step_ms

        return shortest_step_ms(model, args, kwargs, trial.step_ms, count_workers(self.config))

    def _plan(self, model: nn.Module, args: Any, kwargs: Any, single_ms: float) -> StepPlan:
        from gemini.capture.module_hooks import without_hooks
        from gemini.runtime.local_mode import run_locally
        from gemini.snapshot.rng_snapshot import preserve_rng_state

        planner = self.planner()
        assert planner is not None
        with run_locally(), without_hooks(model), preserve_rng_state():
            return planner(model, args, kwargs, local_step_ms=single_ms)

    def _stay_local(self, model: nn.Module, taken: str, single_ms: float) -> bool:
        return self.stay_local(
            model,
            f"{count_workers(self.config)} workers would take {taken} per step, "
            f"this process takes {single_ms:.0f} ms (--mode pipeline uses workers anyway)",
        )

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
                spent = clock.ms()
                for trial in self._trials.values():
                    trial.add(spent)

        torch.autograd.backward = timed

    def _restore_backward(self) -> None:
        if self._backward is not None and not self._trials:
            torch.autograd.backward, self._backward = self._backward, None


def count_workers(config: GeminiConfig) -> int:
    """Return the number of workers for a configuration that does not set one."""
    from gemini.launcher.defaults import count_devices

    return min(count_devices(), config.pipeline_degree or 1)
