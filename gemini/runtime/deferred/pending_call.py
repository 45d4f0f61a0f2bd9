"""A pending call: a call of a model that the script has made and that has not run yet.

    waiting    the tape grows
       │ run(root)     call, tape and backward pipelined ──►  ran    the root is real, gradients wait in its node;
       │                                                             other values are fetched when they are read
       │ resolve()     call runs eagerly, tape replayed  ──►  done   everything is real
       ▼
    Reading a value while waiting: if there is a loss, the step runs for it, and the value is fetched (most scripts
    that read their loss differentiate it next); otherwise the call is resolved.

The call runs under the region, the training modes and the generator state of the time when the script made it. Reruns
(see `step_autograd`) leave buffers and generators unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from gemini.batch_analysis.tape_interpreter import FailedValue, replay_tape
from gemini.errors import GeminiError, WorkerError
from gemini.guards.active_modes import packs_saved_tensors
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall
from gemini.runtime.call_outcome import Eager, FallbackReason
from gemini.runtime.deferred import pending_queue
from gemini.runtime.deferred.call_context import storage_id
from gemini.runtime.deferred.contract import CallRunner, StepResult
from gemini.runtime.deferred.deferred_tensor import CLEAN, DeferredTensor, become, materialize
from gemini.runtime.deferred.grad_assignment import (
    EarlyGradients,
    are_dense,
    assign_gradients,
    can_assign,
    make_freed_root,
)
from gemini.runtime.deferred.repeatable_call import RepeatableCall
from gemini.runtime.deferred.step_autograd import StepValue
from gemini.runtime.deferred.tape_recorder import record
from gemini.runtime.tracebacks import add_note, call_site

WAITING, RAN, DONE = "waiting", "ran", "done"


class PendingCall(RepeatableCall):
    """One call, and the ops that the script has applied to its outputs."""

    def __init__(self, runner: CallRunner, call: ModelCall, model_state: Any = None) -> None:
        super().__init__(runner, call, model_state)
        self.state = WAITING
        # Contents of a completed step. In no graph: the graph refers to this call, and would never be freed.
        self._contents: dict[int, torch.Tensor] = {}
        self._failures: dict[int, FailedValue] = {}
        self._result: StepResult | None = None
        self._error: Exception | None = None
        self._was_tried = self._is_plain_backward = False  # run pipelined, and by a plain backward
        self.is_backward_done = False  # no gradient can pass the root any more
        self._early_gradients: EarlyGradients | None = None
        self._called_from = call_site()

    # ── what the script does ────────────────────────────────────────────────────────────────────────────────────────
    def outputs(self, passed: Mapping[int, torch.Tensor]) -> Any:
        """Return the output of the model with deferred tensors, except those that the caller already has."""
        metas = enumerate(self.runner.output_spec.metas)
        made = [passed[at] if at in passed else self.make(at, meta) for at, meta in metas]
        return self.runner.output_spec.build(made)

    def record(self, function: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return the result of a function, in a tuple, as deferred tensors; None where it must run on contents."""
        can_wait = self.state == WAITING and not pending_queue.is_busy() and not packs_saved_tensors()
        return record(self, function, args, kwargs) if can_wait else None

    def protected_storages(self) -> set[int]:
        """Return the storages that must not be written before the call runs."""
        used = {storage_id(one) for one in self.tape.operands.values() if isinstance(one, torch.nn.Parameter)}
        return self.context.storages() | used

    def depends_on(self, parameters: set[int]) -> bool:
        """Whether it depends on one of these parameters, by identity."""
        used = (*self.runner.parameters, *self.runner.model.parameters(), *self.tape.operands.values())
        return any(id(one) in parameters for one in used)

    # ── becoming real ──────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, value: int) -> None:
        """Compute the contents of a value."""
        if self.state == WAITING:
            root = self._root(value)
            with CLEAN():
                self.resolve() if root is None else self.run(root)
        if self.state == RAN:
            self._publish_contents(value)
        self._raise_for(value)

    def join(self, tensor: DeferredTensor, *, read_only: bool = False) -> None:
        """Make a tensor a part of the graph in which the root is computed.

        With parameters of later steps no such graph can be built. A caller that only reads, or comes after gradients
        have passed for good, gets a node of the same name.
        """
        value = tensor._value
        if self.state == WAITING:
            if self._root(value) == value:
                self.run(value)
            else:
                self.resolve()
        elif self.state == RAN and self._graph is None and self._is_past(read_only):
            self._publish_contents(value)
        elif self.state == RAN and self._graph is None:
            self._graph = self._rerun(connect=True)
            for number in {*self.alive(), value}:
                self._publish(number, self._graph.values[number])
        self._raise_for(value)

    def _is_past(self, read_only: bool) -> bool:
        return (read_only or self.is_backward_done) and self._copies.changed() is not None

    def write(self, tensor: DeferredTensor) -> None:
        """Prepare an in-place write: values that share the tensor's memory must be in one graph with it."""
        if self.state != RAN or self.is_unaliased(tensor._value) or self.has_graph():
            return
        known = {number: one._real for number, one in self._deferred_tensors() if one._real is not None}
        self.join(tensor)
        assert self._graph is not None
        for number, before in known.items():
            made = self._graph.values[number]
            if not isinstance(made, FailedValue):
                made.data.copy_(before.data)  # the script may have written it past autograd
                self._publish(number, made)

    def publish_dependents(self, value: int) -> None:
        """Compute the values derived from a real tensor before it is written."""
        if self.state != RAN:
            return
        made = {value}
        for op in self.tape.ops:
            if not made.isdisjoint(op.reads()):
                made.update(op.results)
        for number in made.intersection(self.alive()) - {value}:
            self._publish_contents(number)

    def run(self, root: int, is_plain_backward: bool = False) -> bool:
        """Run call, tape and backward from a root together; eagerly where that is impossible.

        `is_plain_backward`: the script requests a plain backward from this root. Returns whether that is done, too.
        """
        if self.state != WAITING:
            return False
        with pending_queue.run_exclusively(self):
            self._check()
            self.context.begin()
            result: StepResult | Eager | None = None
            raised: Exception | None = None
            self._was_tried, self._is_plain_backward = True, is_plain_backward
            try:
                with self.context.restore(self.number), ExitStack() as stack:
                    self.region.enter(stack, Region.current())  # the present one may differ
                    result = self.runner.run_pipelined(self, self.tape, root)
            except Exception as error:
                self.context.roll_back()
                raised = error
                if isinstance(error, GeminiError):
                    self._report_failure(error)
            finally:
                if not isinstance(result, StepResult):
                    self._revoke_early()
            if isinstance(result, StepResult):
                self.state, self._result, self._ran_for = RAN, result, root
        if not isinstance(result, StepResult):
            if result is not None:
                self.runner.on_fallback(result)
            self.resolve()
            # Where user code raises in the eager run too, the step itself has not failed.
            if raised is not None and not isinstance(raised, GeminiError) and root not in self._failures:
                self._report_failure(raised)
            return False
        pending_queue.add_completed(self)
        if any(root in op.reads() for op in self.tape.ops):  # else it cannot be requested
            self._contents[root] = result.root.clone()  # the graph takes the object itself
        gradients, given = self._gradients(result, root), self.differentiable(root)
        is_given = (
            result.root.is_cpu and self._early_gradients is not None and self._early_gradients.is_right(gradients)
        )
        if not is_given:
            self._revoke_early()
        is_done = is_given or (is_plain_backward and result.root.is_cpu and self._can_assign(given))
        self.is_backward_done = is_done
        if is_done:
            self.record_gradient(root, is_usual=True)
            if not is_given:
                assign_gradients(given, gradients)
            self._early_gradients = None
            self._publish(root, make_freed_root(result.root, self.nodes.get(root, "")))
        else:
            self._publish(root, StepValue(self, root, result.root, gradients).connect(given))
        return is_done

    def assign_early(self, root: int, gradients: list[Any]) -> None:
        """Assign gradients whose memory is known before they are computed, where that is unobservable."""
        given = self.differentiable(root)
        if self._is_plain_backward and are_dense(gradients) and self._can_assign(given):
            self._early_gradients = EarlyGradients(given, gradients)
            self._early_gradients.give()

    def _can_assign(self, given: list[torch.Tensor]) -> bool:
        # A parameter that the loss reads as well occurs twice.
        return len(given) == len(self.runner.parameters) and can_assign(given)

    def _revoke_early(self) -> None:
        """Revoke gradients that were assigned early."""
        if self._early_gradients is not None:
            self._early_gradients.revoke()
            self._early_gradients = None

    def _report_failure(self, error: Exception) -> None:
        """Report a failed step; if that raises, the call is not repeated."""
        try:
            self.runner.on_failure(error)
        except Exception as fatal:
            self.state, self._error = DONE, fatal
            raise

    def resolve(self, reason: FallbackReason = FallbackReason.READ_EARLY) -> None:
        """Run the call eagerly, for a reason; every value becomes real."""
        if self.state == RAN:
            for value in self.alive():
                self._publish_contents(value)
        if self.state != WAITING:
            return
        if not self._was_tried:
            self.runner.on_fallback(Eager(reason))
        with pending_queue.run_exclusively(self):
            self._check()
            self.context.begin()
            try:
                values = self._eager(self.inputs)
            except Exception as error:
                self.state, self._error = DONE, error
                add_note(error, f"raised by the call of {type(self.runner.model).__name__} at {self._called_from}")
                raise
            self.state = DONE
            replay_tape(self.tape, range(len(self.tape.ops)), values)
        for number in list(self._made):
            self._publish(number, values[number])
        self._release()
        self.inputs = []

    def complete(self, reason: FallbackReason = FallbackReason.READ_EARLY) -> None:
        """Run the call, pipelined where there is a loss; else eagerly, for this reason."""
        root = self._root(-1)
        if root is not None:
            self.run(root)
        else:
            self.resolve(reason)

    def materialize_all(self) -> None:
        """Make every value real and every deferred tensor an ordinary one, for code that bypasses the patches."""
        self.resolve()
        for ref in self._made.values():
            one = ref()
            if type(one) is DeferredTensor and one._real is not None:
                become(one, one._real)

    def compute_before_update(self) -> None:
        """Compute the values that depend on the present parameters: they are about to change."""
        if self.state == WAITING:
            self.resolve(FallbackReason.WRITTEN_EARLY)
        elif self.state == RAN:
            for value in self.alive():
                if not self._can_wait(value):
                    self._publish_contents(value)

    # ── parts of it ────────────────────────────────────────────────────────────────────────────────────────────────
    def _root(self, value: int) -> int | None:
        """Return the value to run the step for when `value` is read; None: the call must run eagerly."""
        if any(dtype == "float16" for _, _, dtype in self.region.autocast):
            return None  # gradients of an unscaled loss would vanish
        scalars = {one for one in (*self.alive(), value) if one >= 0 and self.tape.metas[one].is_scalar()}
        found = {one for one in scalars if self.is_independent(one)}
        if not found:
            return None
        root = self.runner.roots.get(hash(self.tape.signature()), max(found))
        return root if root is None or self.is_independent(root) else None

    def ordered_gradients(self, result: StepResult, root: int) -> list[Any]:
        """Return the gradients of a result in the order of `differentiable`."""
        inputs = [result.inputs.get(at) for at, one in enumerate(self.inputs) if one.requires_grad]
        operands = [result.operands.get(number) for number in self.trainable_operands(root)]
        return [*result.parameters, *inputs, *operands]

    def _gradients(self, result: StepResult, root: int) -> list[Any]:
        found = self.ordered_gradients(result, root)
        # The only references from now on: see Answer.take.
        result.parameters, result.inputs, result.operands = [], {}, {}
        return found

    def _publish_contents(self, value: int) -> None:
        """Make a value of a completed step real."""
        found = self._graph.values[value] if self._graph is not None else self._find(value)
        if found is None:
            values = self._rerun(connect=False).values
            self._contents.update(
                (one, values[one].detach()) for one in {*self.alive(), value, *range(self.tape.outputs)}
            )
            found = self._find(value)
        self._publish(value, found)

    def _find(self, value: int) -> Any:
        """Return a value of a completed step; None where only a rerun can compute it."""
        result, tensor = self._result, self.tensor(value)
        assert result is not None
        if tensor is not None and (type(tensor) is not DeferredTensor or tensor._real is not None):
            return materialize(tensor)
        if value in self.tape.operands:
            return self.tape.operands[value]
        if value in result.kept and value not in self._contents:
            assert result.fetch is not None
            try:
                self._contents[value] = result.fetch(value)
            except WorkerError:
                if self._copies.changed() is not None:
                    raise
                return None  # nothing has changed since: a rerun gives the lost value
        if value in self._contents:
            contents = self._contents[value]
            is_differentiable = self.tape.metas[value].requires_grad
            return (
                StepValue(self, value, contents.detach(), None).connect(self.differentiable(value))
                if is_differentiable
                else contents
            )
        at = self.tape.makers().get(value)
        if at is None or any(op.writes is not None for op in self.tape.ops):
            return None
        known = {one: self._find(one) for one in self.tape.ops[at].reads()}
        if any(one is None for one in known.values()):
            return None
        replay_tape(self.tape, [at], known)
        return known[value]

    def _can_wait(self, value: int) -> bool:
        """Whether contents can be computed without any parameter."""
        assert self._result is not None
        if value in self._result.kept or value in self._contents:
            return True
        if value in self.tape.operands:
            return not isinstance(self.tape.operands[value], torch.nn.Parameter)
        at = self.tape.makers().get(value)
        if at is None or any(op.writes is not None for op in self.tape.ops):
            return False
        return all(self._can_wait(one) for one in self.tape.ops[at].reads())

    def _publish(self, value: int, real: Any) -> None:
        """Make the tensor of a computed value real."""
        if isinstance(real, FailedValue):
            self._failures[value] = real
            return
        tensor = self.tensor(value)
        if type(tensor) is DeferredTensor:
            # Other values of a completed step stay deferred: they may become a part of the root's graph.
            for_good = self.state == DONE or self._graph is not None or value == self._ran_for
            real = become(tensor, real, for_good=for_good)
        if self._graph is not None:
            self._graph.values[value] = real

    def _raise_for(self, value: int) -> None:
        if self._error is not None:
            _raise(self._error)
        if value in self._failures:
            _raise(self._failures[value].error)


def _raise(error: BaseException) -> NoReturn:
    raise error


__all__ = ["DONE", "RAN", "WAITING", "PendingCall"]
