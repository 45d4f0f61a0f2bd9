"""Auto: workers for a model where they make its steps faster, and nothing for one where they do not.

    first call         cold, not counted
    two more           forward and backward timed, in this process, on all its threads
    the next           too short: it stays here, as where this process's threads leave workers nothing to gain (see
                       `bounding`). Else a plan is made; a plan that gains gets workers

A model that stays here costs nothing from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.launcher.model_discovery import Instead
from gemini.launcher.policy import Forced

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan

_COLD, _TIMED = 1, 2  # calls
_SHORT_MS = 20.0  # a step below this gains nothing: messages and waking up cost milliseconds
_WHY_ONE = {
    True: "one worker is asked for, and this process is as good (two or more need --workers 2)",
    False: "this machine has one core and no more devices",
}
_GAIN = 1.1  # a plan below this is not worth its memory and its noise


class Clock:
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
    """The first calls of a model."""

    calls: int = 0
    ms: float = 0.0  # of the timed calls, their backward included

    def add(self, ms: float) -> None:
        """Time spent in the model's forward, or in backward after it."""
        if self.calls > _COLD:
            self.ms += ms

    @property
    def step_ms(self) -> float:
        """Forward and backward of one call."""
        return self.ms / _TIMED


class Auto(Forced):
    """Times a model first."""

    is_lasting = False

    def __init__(self, config: GeminiConfig) -> None:
        super().__init__(config)
        self._trials: dict[int, Trial] = {}
        self._backward: Callable[..., Any] | None = None

    def refuses_compiled(self, model: nn.Module) -> bool:
        """Always: its steps here are faster than those that would be timed, and those of workers are not compiled."""
        self.stays(model, "torch.compile has it (--mode pipeline uses workers)")
        return True

    def decide(self, model: nn.Module) -> Instead | bool | None:
        """Time it; then decide on the call that comes next."""
        if how_many_workers(self.config) < 2:
            return self.stays(model, _WHY_ONE[self.config.workers == 1])
        trial = self._trials.setdefault(id(model), Trial())
        if trial.calls < _COLD + _TIMED:
            self._time_backward()
            return lambda *args, **kwargs: self._timed(model, trial, args, kwargs)
        del self._trials[id(model)]
        self._leave_backward()
        if trial.step_ms < _SHORT_MS:
            return self.stays(model, f"a step of {trial.step_ms:.2g} ms is too short to gain from workers")
        return lambda *args, **kwargs: self._planned(model, trial, args, kwargs)

    def _timed(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> Any:
        self.recognition.pass_over(model)
        trial.calls += 1
        clock = Clock()
        try:
            return self.recognition.call(model, args, kwargs)
        finally:
            trial.add(clock.ms())

    def _planned(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> Any:
        self.recognition.settle(model, managed=self._gains(model, trial, args, kwargs))
        return nn.Module.__call__(model, *args, **kwargs)

    def _gains(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> bool:
        single_ms = trial.step_ms
        self.recognition.stop_watching()
        try:
            least_ms = self._at_best_ms(model, trial, args, kwargs)
            if least_ms * _GAIN > single_ms:
                self.recognition.resume()
                return self._is_no_gain(model, f"at best {least_ms:.0f} ms", single_ms)
            plan = self._plan(model, args, kwargs)
        except Exception as error:
            self.recognition.resume()
            if self.config.strict:
                raise
            return self.stays(model, str(error) or type(error).__name__)
        gain = single_ms / plan.step_ms if plan.step_ms else 0.0
        if gain < _GAIN:
            self.recognition.resume()
            return self._is_no_gain(model, f"{plan.step_ms:.0f} ms", single_ms)
        return self.start(model, plan, single_ms)

    def _at_best_ms(self, model: nn.Module, trial: Trial, args: Any, kwargs: Any) -> float:
        from gemini.launcher.speedup_bound import at_best_ms

        return at_best_ms(model, args, kwargs, trial.step_ms, how_many_workers(self.config))

    def _plan(self, model: nn.Module, args: Any, kwargs: Any) -> StepPlan:
        from gemini.runtime.local_mode import here
        from gemini.runtime.pipelined.without_hooks import hookless
        from gemini.snapshot.model_state import undrawn

        planner = self.planner()
        assert planner is not None
        with here(), hookless(model), undrawn():
            return planner(model, args, kwargs)

    def _is_no_gain(self, model: nn.Module, taken: str, single_ms: float) -> bool:
        return self.stays(
            model,
            f"{how_many_workers(self.config)} workers would take {taken} a step, "
            f"this process takes {single_ms:.0f} ms (--mode pipeline uses them all the same)",
        )

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _time_backward(self) -> None:
        if self._backward is not None:
            return
        backward = self._backward = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock = Clock()
            try:
                return backward(*args, **kwargs)
            finally:
                spent = clock.ms()
                for trial in self._trials.values():
                    trial.add(spent)

        torch.autograd.backward = timed

    def _leave_backward(self) -> None:
        if self._backward is not None and not self._trials:
            torch.autograd.backward, self._backward = self._backward, None


def how_many_workers(config: GeminiConfig) -> int:
    """What this machine has for a configuration that asks for nothing."""
    from gemini.launcher.defaults import devices

    return min(devices(), config.pipeline_degree or 1)
