"""Gradients of a call by running it again in this process, of any order.

The inputs of the run are leaves of its own, so that autograd finds how the results depend on inputs and parameters
directly, and not through what has made the inputs: a weight that is used there as well would get that part twice.

    gradients   = how(run)(inputs, gradients of the results)        a run like any other, of more inputs
    of those    = how(how(run))(…)                                  when they are differentiated in turn
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gemini.autograd_engine import differentiate
from gemini.capture.unhooked_backward import unhooked

Run = Callable[[list[torch.Tensor], bool], list[Any]]  # of inputs; whether what it gives is to be differentiated


@dataclass
class Wanted:
    """What is asked for: gradients of some inputs and parameters; `given` are the results that have a gradient."""

    inputs: list[int]
    parameters: list[torch.Tensor]
    given: list[int]


def gradients_here(
    run: Run, inputs: Sequence[torch.Tensor], wanted: Wanted, gradients: Sequence[torch.Tensor], create_graph: bool
) -> list[Any]:
    """The gradients that are wanted, inputs first; None where one took no part."""
    how, tensors = _gradients_of(run, len(inputs), wanted), [*inputs, *gradients]
    if create_graph:
        return list(Again.apply(how, len(tensors), *tensors, *wanted.parameters))
    with torch.enable_grad():
        return how(_leaves(tensors), False)


def _gradients_of(run: Run, count: int, wanted: Wanted) -> Run:
    def how(tensors: list[torch.Tensor], create_graph: bool) -> list[Any]:
        inputs, gradients = tensors[:count], tensors[count:]
        leaves = [inputs[at] for at in wanted.inputs] + wanted.parameters
        with trained(wanted.parameters), unhooked(wanted.parameters):
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
def trained(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, none of these is frozen: they were not when the call was made."""
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


class Again(torch.autograd.Function):  # type: ignore[misc]
    """A run as a function of its inputs and of parameters."""

    @staticmethod
    def forward(ctx: Any, run: Run, count: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """What the run gives."""
        ctx.set_materialize_grads(False)
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():
            return tuple(run(_leaves(tensors[:count]), False))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients of inputs and parameters."""
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        places = [at for at in range(len(tensors)) if needed[at]]
        inputs = [at for at in places if at < ctx.count]
        given = [at for at, gradient in enumerate(gradients) if gradient is not None]
        wanted = Wanted(inputs, [tensors[at] for at in places if at >= ctx.count], given)
        found = gradients_here(
            ctx.run, tensors[: ctx.count], wanted, [gradients[at] for at in given], torch.is_grad_enabled()
        )
        result: list[Any] = [None] * len(tensors)
        for at, gradient in zip(places, found, strict=True):
            result[at] = gradient
        return (None, None, *result)
