"""Planning time: the predicted time of a plan, from the calls of modules in a run of the model.

    find_batch_dims   runs the model on few samples; the calls of its modules are counted
    check             over a second: one line. In auto mode, refuses a model whose steps are too short for the time
    deadline          in auto mode, planning ends between two of its steps where it has taken too long

Forced modes plan anyway. A cached graph or plan takes less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gemini.log import log_line
from gemini.planner.plan_request import PlanRequest
from gemini.planner.planning_progress import predict_seconds
from gemini.planner.step_plan import UnplannableError

# Per call of a module without inner modules. An LSTMCell loop of 3,000 calls took 18 s, of 900 calls 5.5 s; time per
# operation of code between modules is of the same size, and is not counted.
_SECONDS_PER_CALL = 0.006
_LOGGED_SECONDS = 1.0
_MOST_STEPS = 200  # local steps: a plan that takes longer pays off too late


class CallCount:
    """The calls of modules without inner modules during runs of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._runs = self._calls = 0

    @contextmanager
    def count(self) -> Iterator[CallCount]:
        """Count the calls in the block."""
        handle = register_module_forward_pre_hook(self._add)
        try:
            yield self
        finally:
            handle.remove()

    def _add(self, module: nn.Module, _: Any) -> None:
        self._runs += module is self._model
        self._calls += not module._modules

    @property
    def per_run(self) -> int:
        """The mean number of calls in a run; 0 without a run."""
        return self._calls // self._runs if self._runs else 0


def check_deadline(request: PlanRequest) -> None:
    """Raise UnplannableError where planning has taken longer than it may."""
    if request.deadline_s is not None and time.process_time() > request.deadline_s:
        raise UnplannableError("planning it takes longer than it may cost (--mode pipeline plans anyway)")


def check_planning_time(model: nn.Module, calls: int, request: PlanRequest) -> None:
    """Log a long planning; raise UnplannableError where it takes longer than a stated number of local steps."""
    seconds = calls * _SECONDS_PER_CALL
    predict_seconds(seconds)
    if seconds <= _LOGGED_SECONDS:
        return
    if request.local_step_ms and seconds * 1e3 > _MOST_STEPS * request.local_step_ms:
        raise UnplannableError(
            f"planning it would take about {seconds:.0f} s for {calls} calls of modules, longer than {_MOST_STEPS} "
            f"steps of {request.local_step_ms:.0f} ms in this process (--mode pipeline plans anyway)"
        )
    if not request.quiet:
        log_line(f"gemini: planning {type(model).__name__}: about {seconds:.0f} s for {calls} calls of modules")
