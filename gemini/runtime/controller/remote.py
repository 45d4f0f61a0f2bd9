"""A remote call: a module that runs in a worker, and looks to the program's autograd like any other function.

The parameters of the module are inputs of the function beside its arguments, so that all of autograd works on them as
always: accumulation, hooks, `torch.autograd.grad`, frozen parameters, weights shared by several modules.

    controller      x ──► RemoteCall ──► y ─ … ─► loss.backward() ──► RemoteCall.backward ──► dx, and p.grad
    parameters  p ──────►    │                                             │
    worker                 module(x), graph kept                   autograd.grad over the kept graph

When the graph of the call is freed here, the worker is told to forget its own; a token tensor among the saved ones
notices that, at the moment at which autograd frees them. An activation checkpoint around the call throws the token
away and runs the call again in backward: the new token names the new graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini.capture.regions import Region
from gemini.runtime.controller.faults import raise_remote
from gemini.runtime.generator import get_state, set_state
from gemini.runtime.protocol import Backward, Forward, Gradients, Outputs, Refused
from gemini.runtime.transport.packing import pack, unpack

if TYPE_CHECKING:
    from gemini.runtime.controller.unit import Unit


class RefusedError(Exception):
    """The worker could not do the call; everything is as before."""


class Call:
    """One call of a unit on its way through a worker."""

    def __init__(self, unit: Unit, args: Any, kwargs: Any) -> None:
        self.unit = unit
        self.arguments: tuple[Any, Any] | None = (args, kwargs)
        self.number = unit.worker.next_number()
        self.outputs: Outputs | None = None
        self.inputs: list[torch.Tensor] = []
        self.region = Region.current()

    def run(self) -> Any:
        """The result of the module; raises RefusedError where it must be run here."""
        classes = self.unit.worker.link.classes
        self.body, self.inputs = pack(self.arguments, classes)
        made = iter(RemoteCall.apply(self, len(self.inputs), *self.inputs, *self.unit.trained()))
        assert self.outputs is not None
        tensors = [next(made) if at is None else self.inputs[at] for at in self.outputs.same]
        return unpack(self.outputs.body, tensors, classes)

    def forward(self) -> Outputs:
        """Have the worker run it."""
        unit = self.unit
        self.generator = get_state()
        reply = unit.worker.ask(
            Forward(
                self.number, unit.number, self.body, unit.worker.region_news(self.region), self.generator, unit.news(),
                unit.take_dropped(), self.inputs,
            ),
            unit.forward_text,
        )  # fmt: skip
        if isinstance(reply, Refused):
            raise RefusedError(reply.reason)
        if not isinstance(reply, Outputs):
            raise_remote(reply, unit, "forward")
        if reply.generator:
            set_state(reply.generator)
        self.outputs = reply
        return reply

    def backward(self, gradients: list[Any], inputs: list[int], parameters: list[int]) -> list[Any]:
        """Have the worker run its backward."""
        unit = self.unit
        number = unit.worker.next_number()
        reply = unit.worker.ask(
            Backward(number, self.number, inputs, parameters, unit.take_dropped(), gradients), unit.backward_text
        )
        if not isinstance(reply, Gradients):
            raise_remote(reply, unit, "backward")
        return list(reply.tensors)

    def forget(self, number: int) -> None:
        """The graph has been freed here; the worker is told with the next message. May run in any thread."""
        self.unit.drop(number)
        self.inputs, self.arguments = [], None

    def run_here(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors of the result with a graph of this process, and the parameters they depend on."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            set_state(self.generator)
            if self.arguments is None:
                raise RuntimeError(f"{self.unit.name}: a checkpointed call cannot be differentiated twice in a worker")
            args, kwargs = self.arguments
            result = self.unit.run_here(args, kwargs)
        _, tensors = pack(result, self.unit.worker.link.classes)
        return tensors, self.unit.trained()


class RemoteCall(torch.autograd.Function):  # type: ignore[misc]
    """The node of a call in the program's autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        """Run the call; the results are the tensors it makes."""
        outputs = call.forward()
        made = [
            (tensor, flag)
            for tensor, flag in zip(outputs.tensors, outputs.differentiable, strict=True)
            if tensor is not None
        ]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in made if not flag))
        # The tensors will know this node: a node that knew them too would never be freed.
        call.outputs = outputs._replace(tensors=[])
        ctx.call, ctx.count = call, count
        if any(outputs.differentiable):
            ctx.save_for_backward(token(call.forget, call.number))
        return tuple(tensor for tensor, _ in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients of inputs and parameters."""
        (saved,) = ctx.saved_tensors  # raises as always where the graph has been freed
        call: Call = ctx.call
        call.number = int(saved)  # another one where a checkpoint has run the call again
        needed = ctx.needs_input_grad[2:]
        inputs = [at for at in range(ctx.count) if needed[at]]
        parameters = [at - ctx.count for at in range(ctx.count, len(needed)) if needed[at]]
        if torch.is_grad_enabled():  # the gradients themselves are to be differentiated: only this process can
            found = _differentiable(call, gradients, inputs, parameters)
        else:
            found = call.backward(_all_outputs(call, gradients), inputs, parameters)
        result: list[Any] = [None] * len(needed)
        for at, gradient in zip([*inputs, *(ctx.count + at for at in parameters)], found, strict=True):
            result[at] = gradient
        return (None, None, *result)


def _all_outputs(call: Call, gradients: tuple[Any, ...]) -> list[Any]:
    """Gradients by output; those that were inputs have none here."""
    assert call.outputs is not None
    given = iter(gradients)
    return [next(given) if at is None else None for at in call.outputs.same]


def _differentiable(call: Call, gradients: tuple[Any, ...], inputs: list[int], parameters: list[int]) -> list[Any]:
    tensors, trained = call.run_here()
    pairs = [(t, g) for t, g in zip(tensors, _all_outputs(call, gradients), strict=True) if g is not None]
    wanted = [call.inputs[at] for at in inputs] + [trained[at] for at in parameters]
    outputs, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, wanted, given, create_graph=True, allow_unused=True))


def token(tell: Callable[[int], None], number: int) -> torch.Tensor:
    """A tensor that holds `number`, and calls `tell(number)` when it is freed."""
    memory = memoryview(bytearray(number.to_bytes(8, "little")))
    weakref.finalize(memory, tell, number).atexit = False
    return torch.frombuffer(memory, dtype=torch.int64)
