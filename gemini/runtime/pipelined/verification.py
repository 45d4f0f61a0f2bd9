"""Verification: compares planned steps with their local rerun, before anything of them is published.

    workers run the step ─► local rerun, same inputs and random numbers ─► equal up to rounding?
                                                                            yes  the step is published
                                                                            no   PlanDiffersError: it is rolled back and
                                                                                 runs locally, as all later steps do

Loss, gradients, buffers, the values that the script can read and the states of torch's generators are compared; of a
call without gradients, its outputs, buffers and generators. A rerun has no side effects.

`always`     (`--verify`) the first three steps of every plan, with every loss
otherwise    one step of every plan, with every loss: the first one for which there is time. All reruns of a model
             together take at most half as long as its planning did, plus 2 % of the time of its steps so far. Planning
             runs a model many times, so this is mostly the very first step; with a plan from the cache it may be a
             later one. A rerun is expected to take as long as the longest before, or as all workers together are busy
             in a step. One that may not fit into memory is left out.

The rerun has the whole batch, so statistics and losses over the batch are verified like all others. Plans whose workers
draw their own random numbers (`rng="fast"`) cannot be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.batch_analysis.tape_interpreter import FailedValue
from gemini.errors import GeminiError
from gemini.log import log_line
from gemini.malloc import trim
from gemini.runtime.call_outcome import describe_failure
from gemini.runtime.deferred import PendingCall, StepResult
from gemini.runtime.devices.host_memory import MB, available_memory, format_bytes
from gemini.runtime.local_mode import run_locally
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.loss_request import PreparedLoss
from gemini.runtime.pipelined.step_comparison import Comparison, Pair, coarsest_eps, total_norm
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_failure import describe_out_of_memory
from gemini.snapshot.rng_snapshot import GeneratorStates

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.plan_table import PlanTable

_STEPS = 3  # per plan and loss, with `always`
_OF_PLANNING, _OF_STEPS = 0.5, 0.02  # shares of time that reruns may take


class PlanDiffersError(GeminiError):
    """A planned step differs from its local rerun by more than rounding."""


class PublishedState:
    """The buffers of a model and the generators of the process, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.generators = model, GeneratorStates()
        self.buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def restore(self) -> None:
        """Restore buffers and generators."""
        self.generators.restore()
        for name, buffer in self.model.named_buffers():
            if name in self.buffers and not torch.equal(buffer, self.buffers[name]):
                buffer.data.copy_(self.buffers[name])

    def compare(self, expected: PublishedState, comparison: Comparison) -> None:
        """Compare with the state after a local rerun."""
        comparison.compare_values((f"buffer {name}", one, expected.buffers[name]) for name, one in self.buffers.items())
        pairs = zip(self._generators(), expected._generators(), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            comparison.faults.append("the state of torch's random generator differs")

    def _generators(self) -> list[torch.Tensor]:
        return [self.generators.torch, *self.generators.cuda]


class Verification:
    """Verifies steps of one model."""

    def __init__(self, plans: PlanTable, *, always: bool = False) -> None:
        self.plans, self.managed, self.journal, self.always = plans, plans.managed, plans.journal, always
        self.steps = 0
        self.loss = self.gradient = 0.0  # largest relative differences
        self.worked_ms = 0.0  # of steps
        self.local_ms = 0.0  # a step in this process, without the time that other programs took
        self._spent_ms = 0.0  # of reruns
        self._unverified = 0  # steps by plans before their first verified one

    def is_due(self, kind: CallKind, prepared: PreparedLoss) -> bool:
        """Whether the next step of a kind, with this loss, is to be verified."""
        done, plan = kind.verified.get(id(prepared), 0), kind.plan
        if done >= (_STEPS if self.always else 1):
            return False
        assert plan is not None
        edited = plan.edited_stages()
        if edited is not None and not self.always:
            self._note(f"no step compared with this process: {', '.join(edited[1])} was edited (--verify compares)")
            return False
        reason = 'the workers draw their own random numbers (rng="fast")' if _draws_differently(plan) else ""
        if not reason and not self.always:
            if not self._has_time(kind, plan):
                self._unverified += 1
                self._note("no step compared with this process so far (--verify compares the first ones)")
                return False
            reason = self._find_shortage(plan)
        if reason:
            kind.verified[id(prepared)] = _STEPS
            self._note(f"no step compared with this process: {reason}")
        return not reason

    def check_step(
        self, kind: CallKind, prepared: PreparedLoss, pending: PendingCall, root: int, result: StepResult
    ) -> None:
        """Compare a training step, whose buffers and generators the workers have written, with its rerun.

        Raises PlanDiffersError; buffers and generators are then still those of the workers.
        """
        began = time.perf_counter()
        self._finish(kind, prepared, self._compare_step(kind, prepared, pending, root, result), began)

    def _compare_step(
        self, kind: CallKind, prepared: PreparedLoss, pending: PendingCall, root: int, result: StepResult
    ) -> Comparison:
        model, comparison = pending.runner.model, self._comparison(kind, pending)
        with DeferredSignals(), run_locally():
            written = PublishedState(model)
            try:
                began = time.perf_counter(), time.thread_time()
                with pending.repeat(connect=False) as rerun:
                    wanted = rerun.values[root]
                    if isinstance(wanted, FailedValue):
                        raise wanted.error
                    operands = pending.trainable_operands(root)
                    gradients = rerun.differentiate(root, torch.ones_like(wanted), False, operands)
                    self._record_local_time(*began)
                    expected = PublishedState(model)
            except Exception as error:
                self._handle_failure(error, kind, prepared, comparison)
            else:
                size = cache(lambda: total_norm(pending.differentiable(root)))
                found = pending.ordered_gradients(result, root)
                comparison.compare_gradients(
                    _by_tensor(pending, root, found, gradients),
                    lambda: float(wanted.detach().abs()) / max(size(), 1e-30),
                )
                comparison.compare_loss(result.root, wanted, lambda: total_norm(gradients) * size())
                comparison.compare_values(_read_values(result, rerun.values))
                written.compare(expected, comparison)
            finally:
                written.restore()
        return comparison

    def _record_local_time(self, wall: float, cpu: float) -> None:
        """Record how long a step takes in this process, by the clock and without the time that other programs took."""
        if not self.local_ms:
            wall_ms = (time.perf_counter() - wall) * 1e3
            self.local_ms = wall_ms
            if all(worker.device.kind == "cpu" for worker in self.managed.pool.workers):  # backward runs in this thread
                self.local_ms = min(wall_ms, (time.thread_time() - cpu) * 1e3)
            self.journal.local_ms = self.journal.local_ms or self.local_ms

    def check_outputs(
        self, kind: CallKind, prepared: PreparedLoss, found: list[torch.Tensor], before: PublishedState,
        rerun: Callable[[], list[torch.Tensor]],
    ) -> None:  # fmt: skip
        """Compare a call without gradients with its rerun; `before` is the state before the call.

        Raises PlanDiffersError, with that state restored.
        """
        began = time.perf_counter()
        self._finish(kind, prepared, self._compare_outputs(kind, prepared, found, before, rerun), began)

    def _compare_outputs(
        self, kind: CallKind, prepared: PreparedLoss, found: list[torch.Tensor], before: PublishedState,
        rerun: Callable[[], list[torch.Tensor]],
    ) -> Comparison:  # fmt: skip
        comparison = self._comparison(kind)
        with DeferredSignals(), run_locally():
            written = PublishedState(before.model)
            try:
                before.restore()
                wanted = rerun()
                expected = PublishedState(before.model)
            except Exception as error:
                self._handle_failure(error, kind, prepared, comparison)
            else:
                if len(found) == len(wanted):
                    comparison.compare_values(_number("output", found, wanted))
                else:
                    comparison.faults.append(f"the output has {len(found)} tensors, not {len(wanted)}")
                written.compare(expected, comparison)
            finally:
                (before if comparison.faults else written).restore()
        return comparison

    def _has_time(self, kind: CallKind, plan: StepPlan) -> bool:
        expected_ms = kind.rerun_ms or plan.nworkers * (kind.timings.last_ms or plan.step_ms)
        return self._spent_ms + expected_ms <= _OF_PLANNING * self.plans.planning_ms + _OF_STEPS * self.worked_ms

    def _find_shortage(self, plan: StepPlan) -> str:
        """Return why a rerun may not fit into memory; '' where it does."""
        needed, left = _rerun_bytes(plan), available_memory()
        if self.managed.shared_parameters.model_device.type == "cuda":
            left = torch.cuda.mem_get_info(self.managed.shared_parameters.model_device)[0], "of the device's memory"
        if left is None or needed <= left[0]:
            return ""
        return f"a rerun may need {format_bytes(needed)}, {format_bytes(left[0])} {left[1]} is available"

    def _comparison(self, kind: CallKind, pending: PendingCall | None = None) -> Comparison:
        assert kind.plan is not None
        metas = (meta for node in kind.plan.graph.nodes for meta in node.outputs.values())
        dtypes = {getattr(torch, meta.dtype.removeprefix("torch.")) for meta in metas}
        if pending is not None:
            dtypes |= {meta.dtype for meta in pending.tape.metas}
            dtypes |= {getattr(torch, name) for _, _, name in pending.region.autocast}
        return Comparison(coarsest_eps(dtypes))

    def _handle_failure(self, error: Exception, kind: CallKind, prepared: PreparedLoss, comparison: Comparison) -> None:
        """Treat an exception of a rerun as a difference: under `python` the step would have raised it."""
        if reason := describe_out_of_memory(error):
            kind.verified[id(prepared)] = _STEPS
            self._note(f"no step compared with this process: {reason.partition(chr(10))[0]}")
        else:
            comparison.faults.append(f"the rerun raises {describe_failure(error)}")

    def _finish(self, kind: CallKind, prepared: PreparedLoss, comparison: Comparison, began: float) -> None:
        """Record a comparison; raise where it found a difference."""
        trim()  # the next reruns are far away
        took_ms = (time.perf_counter() - began) * 1e3
        self._spent_ms += took_ms
        kind.rerun_ms = max(kind.rerun_ms, took_ms)
        done = kind.verified.get(id(prepared), 0)
        edited = kind.plan and kind.plan.edited_stages()
        if comparison.faults and edited:  # on purpose
            kind.verified[id(prepared)] = _STEPS
            self.journal.verification = self._describe_edits(edited[1], comparison)
            log_line(f"gemini: {self.managed.name}: {self.journal.verification}")
            return
        if comparison.faults:
            raise PlanDiffersError(self._describe(kind, comparison))
        if done >= _STEPS:  # it did not fit into memory
            return
        kind.verified[id(prepared)] = done + 1
        self.steps += 1
        self.loss, self.gradient = max(self.loss, comparison.loss), max(self.gradient, comparison.gradient)
        compared = "1 step" if self.steps == 1 else f"{self.steps} steps"
        self.journal.verified.append((self.journal.history.calls, comparison.loss, comparison.gradient))
        self.journal.verification = (
            f"{compared} compared with this process: the loss differs by at most {self.loss:.1e}, "
            f"gradients by {self.gradient:.1e} relative"
        )
        if self.always and self.steps == _STEPS:
            log_line(f"gemini: {self.managed.name}: {self.journal.verification}")

    def _describe_edits(self, edited: tuple[str, ...], comparison: Comparison) -> str:
        first, *others = comparison.faults
        more = f" and {len(others)} more difference{'s' * (len(others) > 1)}" if others else ""
        return f"the edited {', '.join(edited)} differ from the model: {first}{more}"

    def _describe(self, kind: CallKind, comparison: Comparison) -> str:
        plan, (first, *others) = kind.plan, comparison.faults
        assert plan is not None
        more = f" and {len(others)} more difference{'s' * (len(others) > 1)}" if others else ""
        earlier = f"; earlier steps that were not compared: {self._unverified}" if self._unverified else ""
        return (
            f"a step by its plan ({plan.nstages} stages on {plan.nworkers} workers, {plan.name} with "
            f"{plan.micro_batches_text}) is not equal to its rerun in this process: {first}{more}{earlier}"
        )

    def _note(self, text: str) -> None:
        if not self.steps:
            self.journal.verification = text


def _draws_differently(plan: StepPlan) -> bool:
    """Whether workers draw other random numbers than this process."""
    return plan.uses_torch_rng and not any(plan.rng_patterns)


def _read_values(result: StepResult, values: dict[int, Any]) -> list[Pair]:
    """Return the values that workers retain for the script, with those of the rerun."""
    fetch = result.fetch
    if fetch is None:
        return []
    known = [number for number in sorted(result.kept) if isinstance(values.get(number), torch.Tensor)]
    return [(f"value {number} of output and loss", fetch(number), values[number]) for number in known]


def _number(what: str, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[Pair]:
    return [(f"{what} {at}", *pair) for at, pair in enumerate(zip(found, wanted, strict=True))]


def _by_tensor(
    pending: PendingCall, root: int, found: Iterable[torch.Tensor | None], wanted: Iterable[torch.Tensor | None]
) -> list[Pair]:
    """Return the gradients of each tensor; those of a parameter that the loss reads too are two, and are added."""
    names = {id(parameter): name for name, parameter in pending.runner.model.named_parameters()}
    names |= {id(one): f"input {at}" for at, one in enumerate(pending.inputs)}
    sums: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
    for tensor, one, other in zip(pending.differentiable(root), found, wanted, strict=True):
        first, second = sums.get(id(tensor), (None, None))
        sums[id(tensor)] = _add(first, one), _add(second, other)
    return [(f"the gradient of {names.get(key, 'a tensor of the loss')}", *pair) for key, pair in sums.items()]


def _add(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients that may not exist."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _rerun_bytes(plan: StepPlan) -> float:
    """Return an upper bound of the memory of a local rerun: the whole batch, where workers hold some micro-batches."""
    parts = [worker.memory for worker in plan.analysis.workers]
    activations = sum(one.activations_mb + one.working_mb for one in parts) * plan.micro_batches
    return MB * (activations + 2 * sum(one.gradients_mb + one.weights_mb for one in parts))
