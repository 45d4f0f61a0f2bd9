"""Delayed weight gradients: computed later than input gradients.

    I    grad of input  = g · W         at once: an earlier stage waits for it
    W    grad of weight += gᵀ · x       when no stage waits; directly into the summed gradient

Linear, convolution and embedding become autograd functions that return the gradient of their input and queue (g, x).
This applies to parameters themselves: computed weights (weight norm, parametrizations), autocast, functorch
transforms and everything else use ordinary autograd in the input-gradient action. A gradient that the model computes in
its own forward is computed at once as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class GradientSums(Protocol):
    """The buffers in which the gradients of parameters are summed up during a step."""

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the buffer of a parameter, and whether it is still to be filled (the first part overwrites it)."""


DelayedGrad = Callable[[GradientSums], None]


class WeightGradStore:
    """The store of one process. `active`: ops of a stage use it; `queue`: a backward action collects into it."""

    def __init__(self) -> None:
        self.active = False
        self.parameters: set[int] = set()  # ids of the parameters of stages
        self.queue: deque[DelayedGrad] | None = None

    def set_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Set the parameters whose gradients may be delayed; the caller keeps them alive."""
        self.parameters = {id(parameter) for parameter in parameters}

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Let ops of stages use the store inside."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def collect_into(self, queue: deque[DelayedGrad]) -> Iterator[None]:
        """Run the backward of a stage inside; its weight gradients go to `queue`."""
        before, self.queue = self.queue, queue
        try:
            with self.activate():
                yield
        finally:
            self.queue = before

    def accepts(self, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
        """Return whether an op on these tensors delays its weight gradient."""
        return (
            self.active
            and id(weight) in self.parameters
            and weight.requires_grad
            and torch.is_grad_enabled()
            and type(given) in (torch.Tensor, torch.nn.Parameter)
            and given.layout is torch.strided
            and not weight.is_complex()
            and (bias is None or not bias.requires_grad or id(bias) in self.parameters)
            and not torch.is_autocast_enabled(weight.device.type)
            and not torch._C._are_functorch_transforms_active()
        )

    def is_collecting(self) -> bool:
        """Return whether a weight gradient can be delayed: in a backward action that is not itself differentiated."""
        return self.queue is not None and not torch.is_grad_enabled()

    def delay(self, later: DelayedGrad) -> None:
        """Add a delayed weight gradient."""
        if self.queue is None:
            raise RuntimeError("no backward collects weight gradients")
        self.queue.append(later)


class ImmediateQueue(deque[DelayedGrad]):
    """A queue that computes at once, where no stage waits for the input gradient, so nothing is retained."""

    def __init__(self, gradients: GradientSums) -> None:
        super().__init__()
        self._gradients = gradients

    def append(self, later: DelayedGrad, /) -> None:
        """Compute the gradient."""
        later(self._gradients)


def run_delayed(queue: deque[DelayedGrad], gradients: GradientSums) -> None:
    """Compute the delayed gradients; each entry is released as soon as it is done."""
    with torch.no_grad():
        while queue:
            queue.popleft()(gradients)


STORE = WeightGradStore()


def as_rows(given: torch.Tensor) -> Any:
    """Return a tensor as a matrix of rows."""
    return given if given.dim() == 2 else given.reshape(-1, given.shape[-1])
