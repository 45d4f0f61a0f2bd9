"""Rerun: re-execution of a call in this process, for gradients that the workers cannot compute.

A call that ran remotely has no local graph. Higher-order gradients, gradients of another value than the loss, and a
second backward are answered by running the call again, in a graph that ends at stand-ins for its inputs. Autograd then
finds how the results depend on inputs and parameters directly; a weight that also contributed to an input would
otherwise be counted twice.

    compute_gradients(run, …)    one call of a module or model (eager dispatch), of any order:
                                 gradients = derivative(run)(inputs, output gradients), itself a run of more inputs
    Rerun                        a deferred step: the values of its tape stay connected to the script's graph, and
                                 gradients pass the stand-ins except while the rerun itself is differentiated
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gemini.autograd_engine import differentiate
from gemini.capture.module_hooks import without_tensor_hooks

Run = Callable[[list[torch.Tensor], bool], list[Any]]  # of inputs; whether its results will be differentiated


@dataclass
class GradientRequest:
    """The requested gradients: of some inputs and parameters; `given` are the results that have a gradient."""

    inputs: list[int]
    parameters: list[torch.Tensor]
    given: list[int]


def compute_gradients(
    run: Run,
    inputs: Sequence[torch.Tensor],
    wanted: GradientRequest,
    gradients: Sequence[torch.Tensor],
    create_graph: bool,
) -> list[Any]:
    """Run a call again and return the requested gradients, inputs first; None for tensors that took no part."""
    how, tensors = _derivative(run, len(inputs), wanted), [*inputs, *gradients]
    if create_graph:
        return list(RerunFunction.apply(how, len(tensors), *tensors, *wanted.parameters))
    with torch.enable_grad():
        return how(_leaves(tensors), False)


def _derivative(run: Run, count: int, wanted: GradientRequest) -> Run:
    def how(tensors: list[torch.Tensor], create_graph: bool) -> list[Any]:
        inputs, gradients = tensors[:count], tensors[count:]
        leaves = [inputs[at] for at in wanted.inputs] + wanted.parameters
        with unfrozen(wanted.parameters), without_tensor_hooks(wanted.parameters):
            results = run(inputs, True)
            pairs = [(results[at], g) for at, g in zip(wanted.given, gradients, strict=True)]
            pairs = [(result, g) for result, g in pairs if result is not None and result.requires_grad]
            if not pairs or not leaves:
                return [None] * len(leaves)
            ends, given = zip(*pairs, strict=True)
            if create_graph:
                return list(torch.autograd.grad(ends, leaves, given, create_graph=True, allow_unused=True))
            return list(differentiate(ends, given, leaves, retain_graph=True))

    return how


@contextmanager
def unfrozen(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, none of these parameters is frozen: they were not at the time of the call."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _leaves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().requires_grad_() if tensor.requires_grad else tensor for tensor in tensors]


class RerunFunction(torch.autograd.Function):  # type: ignore[misc]
    """A run as a function of its inputs and of parameters."""

    @staticmethod
    def forward(ctx: Any, run: Run, count: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Return the results of the run."""
        ctx.set_materialize_grads(False)
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():
            return tuple(run(_leaves(tensors[:count]), False))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of inputs and parameters."""
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        places = [at for at in range(len(tensors)) if needed[at]]
        inputs = [at for at in places if at < ctx.count]
        given = [at for at, gradient in enumerate(gradients) if gradient is not None]
        wanted = GradientRequest(inputs, [tensors[at] for at in places if at >= ctx.count], given)
        found = compute_gradients(
            ctx.run, tensors[: ctx.count], wanted, [gradients[at] for at in given], torch.is_grad_enabled()
        )
        result: list[Any] = [None] * len(tensors)
        for at, gradient in zip(places, found, strict=True):
            result[at] = gradient
        return (None, None, *result)


# ── deferred steps ────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class GradientSwitch:
    """Whether gradients end at the stand-ins."""

    is_closed: bool = False


@dataclass
class Rerun:
    """Stand-ins for the inputs of a step, and the values computed from them."""

    parameters: list[torch.Tensor]
    inputs: list[torch.Tensor]
    operands: dict[int, torch.Tensor]
    switch: GradientSwitch
    values: dict[int, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        parameters: list[torch.Tensor], inputs: list[torch.Tensor], operands: dict[int, torch.Tensor], connect: bool
    ) -> Rerun:
        """Create stand-ins, connected to the script's graph or not."""
        switch = GradientSwitch()

        def stand_in(one: torch.Tensor) -> torch.Tensor:
            if not one.requires_grad:
                return one
            with torch.enable_grad():
                return StandIn.apply(switch, one) if connect else one.detach().requires_grad_()

        given = {number: stand_in(one) for number, one in operands.items()}
        return Rerun(parameters, [stand_in(one) for one in inputs], given, switch)

    def differentiate(self, value: int, gradient: torch.Tensor, create_graph: bool, operands: list[int]) -> list[Any]:
        """Return the gradients of parameters, of inputs that require one, and of these operands.

        Hooks of parameters run where the script's backward delivers the gradients, and not here as well.
        """
        inputs = [one for one in self.inputs if one.requires_grad]
        wanted = [*self.parameters, *inputs, *(self.operands[number] for number in operands)]
        self.switch.is_closed = True
        try:
            with without_tensor_hooks(self.parameters):
                if create_graph:
                    return list(torch.autograd.grad(
                        [self.values[value]], wanted, [gradient], create_graph=True, allow_unused=True
                    ))  # fmt: skip
                return list(differentiate([self.values[value]], [gradient], wanted, retain_graph=True))
        finally:
            self.switch.is_closed = False


class StandIn(torch.autograd.Function):  # type: ignore[misc]
    """The same contents; gradients pass unless the switch is closed."""

    @staticmethod
    def forward(ctx: Any, switch: GradientSwitch, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        ctx.set_materialize_grads(False)
        ctx.switch = switch
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        """Pass the gradient, or drop it."""
        return None, None if ctx.switch.is_closed else gradient
