"""Detach: tensors at which the autograd history of a node begins, and the time of backward in the autograd thread.

A leaf tensor would be kept alive by the history that leads to it, and cannot be written in place. A detached tensor of
this module shares the memory, has its own history, and keeps nothing alive.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge


class _Detach(torch.autograd.Function):  # type: ignore[misc]
    """The same memory, at the start of a new history."""

    @staticmethod
    def forward(_: Any, token: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return value.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        BACKWARD_TIMER.ended = time.perf_counter()
        return None, None


@dataclass
class BackwardTimer:
    """The start and end of backward in the thread that runs it (s). On a GPU that is the autograd thread; switching to
    it and back takes longer than many nodes. Detached inputs have a node's oldest history, so they are reached last."""

    began: float = 0.0
    ended: float = 0.0

    def begin(self, _: Any) -> None:
        """Record the start; a hook of the node's functions."""
        self.began = self.began or time.perf_counter()

    def take_ms(self) -> float | None:
        """Return the elapsed ms, if start and end were recorded, and reset."""
        passed = (self.ended - self.began) * 1e3 if self.began and self.ended else None
        self.began = self.ended = 0.0
        return passed


BACKWARD_TIMER = BackwardTimer()
TOKEN = torch.zeros((), requires_grad=True)  # requesting its gradient makes autograd run `_Detach.backward`


def detach_with_grad(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that requires gradients."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return detach_with_grad(value)
    found: torch.Tensor = _Detach.apply(TOKEN, value)
    return found


def arm_backward_timer(roots: Sequence[GradientEdge], ends: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let `BACKWARD_TIMER` record backward from some roots; return the inputs to request gradients for."""
    BACKWARD_TIMER.take_ms()
    for node in {edge.node for edge in roots}:
        node.register_prehook(BACKWARD_TIMER.begin)
    return (*ends, TOKEN)
