"""A planned step: how deferred calls of one kind and batch size run, pipelined or by eager dispatch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from gemini.batch_analysis.loss_tape import Tape
from gemini.ir.call_binding import ModelCall
from gemini.planner.step_plan import StepPlan
from gemini.random_numbers.host_rng import HostRandomResults
from gemini.runtime.call_outcome import Eager
from gemini.runtime.deferred import CallRunner, PendingCall, StepResult
from gemini.runtime.eager.microbatches import run_forward
from gemini.runtime.memory.shared_layout import MisplacedTensor
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.local_microbatches import run_microbatches

if TYPE_CHECKING:
    from gemini.pipe.piped_model import Piped
    from gemini.runtime.pipelined.pipelined_model import PipelinedModel


@dataclass(kw_only=True)
class PlannedStep(CallRunner):
    """Runs steps of one kind of call, with one number of samples."""

    pipelined: PipelinedModel
    kind: CallKind
    samples: int
    plan: StepPlan  # of the last call: the kind may have lost its own when the call runs
    forward: Any  # the model, or its forward where its hooks already run

    def run_eager(self, args: Any, kwargs: Any) -> Any:
        """Return the output; where calls assign attributes, with their values, and the model's are as before."""
        if not self.plan.attribute_writes:
            return run_unpipelined(self.plan, self.model, self.forward, args, kwargs)
        attributes = self.pipelined.attributes
        with attributes.restore(self.plan, self.model):
            output = run_unpipelined(self.plan, self.model, self.forward, args, kwargs)
            return output, attributes.values(self.plan, self.model)

    def run_pipelined(self, pending: PendingCall, tape: Tape, root: int) -> StepResult | Eager:
        """Run the step by the plan of its kind."""
        if reason := self.pipelined.managed.local_reason:
            return Eager(reason)
        try:
            return self.pipelined.run_step(self.kind, self.samples, pending, tape, root)
        except MisplacedTensor as astray:
            return Eager(str(astray))

    def on_failure(self, error: Exception) -> None:
        """Count the failure and fall back to eager dispatch."""
        self.pipelined.record_failure(self.kind, error)

    def on_fallback(self, outcome: Eager) -> None:
        """Record that the call runs by eager dispatch."""
        self.pipelined.record_fallback(outcome.reason)

    def is_call_output(self, value: Any) -> bool:
        """Whether a call has assigned this value to an attribute of the model."""
        return self.pipelined.attributes.is_assigned(value)


class PlannedCall(NamedTuple):
    """A call of a kind that has a plan."""

    model: nn.Module
    call: ModelCall
    args: Any
    kwargs: Any
    plan: StepPlan
    forward: Any  # the model, or its forward where its hooks already run
    host_draws: HostRandomResults | None = None

    def fall_back(self, reason: str) -> PlannedEager:
        """Return the outcome of running it by eager dispatch."""
        return PlannedEager(reason, self.args, self.kwargs, plan=self.plan, host_draws=self.host_draws)


@dataclass(frozen=True, kw_only=True)
class PlannedEager(Eager):
    """Eager dispatch of a call that has a plan."""

    plan: StepPlan
    host_draws: HostRandomResults | None = None
    shows: tuple[CallKind, int] | None = None  # the kind and number of samples whose output spec the call shows

    def run(self, model: nn.Module, forward: Any) -> Any:
        """Run the call."""
        stages = self.plan.edited_in_process()
        with nullcontext() if self.host_draws is None else self.host_draws.states_of_call():
            if stages is not None:  # of a compiled program: they replace the model here as well
                run = stages if forward is model else partial(_run_stages, stages, forward)
                return run(*self.args, **self.kwargs)
            return run_unpipelined(self.plan, model, forward, self.args, self.kwargs)


def _run_stages(stages: Piped, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return stages.run_stages(forward, args, kwargs)


def run_unpipelined(plan: StepPlan, model: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a call that has a plan by eager dispatch; by micro-batches in this process where each has its statistics."""
    if plan.forms.own_statistics:
        return run_microbatches(plan, model, args, kwargs)
    return run_forward(model, forward, args, kwargs)
