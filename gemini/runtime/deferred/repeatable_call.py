"""A call that can be made again: what it was given, and gradients from a graph that is made for them.

Whatever is asked of a step that a run in the workers does not answer (gradients of another value, of the gradients
themselves, a second time) is answered by making the call again, from what it was given, as it was then.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
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
from gemini.runtime.deferred.contract import StepRunner, flatten_output
from gemini.runtime.deferred.deferred_tensor import materialize
from gemini.runtime.rerun import Rerun

if TYPE_CHECKING:
    from gemini.runtime.deferred.pending_call import PendingCall

if TYPE_CHECKING:
    pass

_numbers = itertools.count()  # of calls, in the order in which the program makes them


class RepeatableCall(CallValues):
    """One call, with all that it takes to make it again."""

    def __init__(self, runner: StepRunner, call: ModelCall, model_state: Any = None) -> None:
        super().__init__(runner.output_spec)
        self.runner, self.number = runner, next(_numbers)
        self.model_state = model_state  # the state that the model was in
        self.region = Region.current()
        self._copies.watch(runner.parameters)
        self.call = call
        self.inputs = [self._copies.of(tensor) for tensor in self.call.tensors]
        self.call.tensors = self.inputs
        self.context = CallContext(runner, model_state)
        self._graph: Rerun | None = None  # all values in a graph of their own, from a rerun
        self._ran_for = -1
        self._arrived: set[int] = set()  # values that gradients have come to

    def differentiable(self, value: int) -> list[torch.Tensor]:
        """What gradients are given to from a value: parameters, inputs, operands that it is made of."""
        operands = [self.tape.operands[number] for number in self._trainable_operands(value)]
        return [*self.runner.parameters, *(one for one in self.inputs if one.requires_grad), *operands]

    def _trainable_operands(self, value: int) -> list[int]:
        """The operands with a gradient that a value is made of; what others come from may be written to since."""
        found = [number for number, one in self.tape.operands.items() if one.requires_grad]
        if not found:
            return found
        read = {one for at in self.tape.ops_needed_for(value) for one in self.tape.ops[at].reads()}
        return [number for number in found if number in read or number == value]

    def record_gradient(self, value: int, is_usual: bool) -> None:
        """A gradient has come to a value of a step that has run: learn for which one it should have been run."""
        self._arrived.add(value)
        if self._arrived != {self._ran_for} or not is_usual:
            is_single = is_usual and len(self._arrived) == 1 and self.tape.metas[value].is_scalar()
            self.runner.roots[hash(self.tape.signature())] = value if is_single else None

    def roots(self) -> tuple[torch.Tensor | None, Any]:
        """The root that the step was run for, if the program still has it, and the same in the graph of a rerun."""
        tensor = self.tensor(self._ran_for)
        return (None if tensor is None else materialize(tensor)), None if self._graph is None else self._graph.values[
            self._ran_for
        ]

    def has_graph(self) -> bool:
        """Whether values of it are in a graph of their own, with the program's hooks."""
        return self._graph is not None

    def differentiate(self, value: int, gradient: torch.Tensor, create_graph: bool) -> list[Any]:
        """Gradients of what is differentiable, from a graph made for it."""
        rerun = self._graph
        if rerun is None or create_graph:
            rerun = self._rerun(connect=create_graph)
        learning = self._trainable_operands(value)
        try:
            return rerun.differentiate(value, gradient, create_graph, learning)
        except RuntimeError:
            if rerun is not self._graph:
                raise
        # The program has values of that graph: its own backward has come through there first, and freed it.
        return self._rerun(connect=False).differentiate(value, gradient, create_graph, learning)

    def _rerun(self, connect: bool) -> Rerun:
        rerun = Rerun.of(self.runner.parameters, self.inputs, self.tape.operands, connect)
        with pending_queue.run_exclusively(cast("PendingCall", self)), self.context.rewind(), torch.enable_grad():
            self._check()
            rerun.values = self._eager(rerun.inputs)
            tape = replace(self.tape, operands=rerun.operands)
            replay_tape(tape, range(len(tape.ops)), rerun.values)
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
        if form != expected.form or metas != expected.metas:
            raise GeminiError(
                f"{type(self.runner.model).__name__} has returned something else than the call of this kind before\n"
                "    → run it with eager dispatch: its output depends on more than the kinds of its inputs"
            )
        return dict(enumerate(found))

    def _check(self) -> None:
        if (one := self._copies.changed()) is not None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a parameter of shape {list(one.shape)}, since the call of {type(self.runner.model).__name__}"
            )
