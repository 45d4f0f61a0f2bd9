"""A repeatable call: a call with all that is needed to run it again, and gradients from that run.

Requests that the pipelined run does not answer (gradients of another value, higher-order gradients, a second backward)
are answered by running the call again from its copied inputs, in its original context.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from gemini.batch_analysis.loss_tape import Meta
from gemini.batch_analysis.tape_interpreter import replay_tape
from gemini.errors import GeminiError
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall
from gemini.runtime.deferred import pending_queue
from gemini.runtime.deferred.call_context import CallContext
from gemini.runtime.deferred.call_values import CallValues
from gemini.runtime.deferred.contract import CallRunner, flatten_output
from gemini.runtime.deferred.deferred_tensor import materialize
from gemini.runtime.rerun import Rerun

if TYPE_CHECKING:
    from gemini.runtime.deferred.pending_call import PendingCall

if TYPE_CHECKING:
    pass

_numbers = itertools.count()  # of calls, in the order of the script


class RepeatableCall(CallValues):
    """One call, with all that is needed to run it again."""

    def __init__(self, runner: CallRunner, call: ModelCall, model_state: Any = None) -> None:
        super().__init__(runner.output_spec)
        self.runner, self.number = runner, next(_numbers)
        self.model_state = model_state  # of the model at the call
        self.region = Region.current()
        self._copies.watch(runner.parameters)
        self.call = call
        self.inputs = [self._copies.of(tensor) for tensor in self.call.tensors]
        self.call.tensors = self.inputs
        self.context = CallContext(runner, model_state)
        self._graph: Rerun | None = None  # all values in the graph of a rerun
        self._ran_for = -1
        self._arrived: set[int] = set()  # values that have received gradients

    def differentiable(self, value: int) -> list[torch.Tensor]:
        """Return the tensors that receive gradients from a value: parameters, inputs, operands of its ops."""
        operands = [self.tape.operands[number] for number in self.trainable_operands(value)]
        return [*self.runner.parameters, *(one for one in self.inputs if one.requires_grad), *operands]

    def trainable_operands(self, value: int) -> list[int]:
        """Return the operands with a gradient that a value depends on; others may have been written since."""
        found = [number for number, one in self.tape.operands.items() if one.requires_grad]
        if not found:
            return found
        read = {one for at in self.tape.ops_needed_for(value) for one in self.tape.ops[at].reads()}
        return [number for number in found if number in read or number == value]

    def record_gradient(self, value: int, is_usual: bool) -> None:
        """Record that a gradient has arrived at a value of a completed step, to learn the intended root."""
        self._arrived.add(value)
        if self._arrived != {self._ran_for} or not is_usual:
            is_single = is_usual and len(self._arrived) == 1 and self.tape.metas[value].is_scalar()
            self.runner.roots[hash(self.tape.signature())] = value if is_single else None

    def roots(self) -> tuple[torch.Tensor | None, Any]:
        """Return the root that the step ran for, if the script still holds it, and its twin in the rerun's graph."""
        tensor = self.tensor(self._ran_for)
        return (None if tensor is None else materialize(tensor)), None if self._graph is None else self._graph.values[
            self._ran_for
        ]

    def has_graph(self) -> bool:
        """Whether its values are in a graph of their own, with hooks of the script."""
        return self._graph is not None

    def differentiate(self, value: int, gradient: torch.Tensor, create_graph: bool) -> list[Any]:
        """Return the gradients of differentiable tensors, from a graph built for it."""
        rerun = self._graph
        if rerun is None or create_graph:
            rerun = self._rerun(connect=create_graph)
        learning = self.trainable_operands(value)
        try:
            return rerun.differentiate(value, gradient, create_graph, learning)
        except RuntimeError:
            if rerun is not self._graph:
                raise
        # The script's own backward has passed through that graph first, and freed it.
        return self._rerun(connect=False).differentiate(value, gradient, create_graph, learning)

    @contextmanager
    def repeat(self, connect: bool) -> Iterator[Rerun]:
        """Run the call and its tape again; inside, buffers and generators are those that this run has left."""
        rerun = Rerun.of(self.runner.parameters, self.inputs, self.tape.operands, connect)
        pending = cast("PendingCall", self)
        with pending_queue.run_exclusively(pending, again=True), self.context.rewind(), torch.enable_grad():
            rerun.values = self._eager(rerun.inputs)
            tape = replace(self.tape, operands=rerun.operands)
            replay_tape(tape, range(len(tape.ops)), rerun.values)
            yield rerun

    def _rerun(self, connect: bool) -> Rerun:
        self._check()
        with self.repeat(connect) as rerun:
            return rerun

    def _eager(self, inputs: list[torch.Tensor]) -> dict[int, Any]:
        args, kwargs = self.call.with_tensors(inputs)
        with ExitStack() as stack:
            stack.enter_context(self.context.restore(self.number))
            self.region.enter(stack, Region.current())
            form, found = flatten_output(self.runner.run_again(args, kwargs))
        expected, passed = self.runner.output_spec, self.runner.passed
        metas = tuple(
            expected.metas[at] if at in passed and at < len(expected.metas) else Meta.of(one)
            for at, one in enumerate(found)
        )
        if form != expected.form or not all(map(Meta.has_same_kind, metas, expected.metas)):
            raise GeminiError(
                f"{type(self.runner.model).__name__} returned another structure than the previous call of this kind\n"
                "    → run it with eager dispatch: its output depends on more than the metadata of its inputs"
            )
        return dict(enumerate(found))

    def _check(self) -> None:
        if (one := self._copies.changed()) is not None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a parameter of shape {list(one.shape)}, since the call of {type(self.runner.model).__name__}"
            )
