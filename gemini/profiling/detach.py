"""Cuts: where the history of a node begins, and the times when a backward that stops there begins and ends.

A leaf would do, but a leaf is kept alive by the history that leads to it, and cannot be written to in place. A cut is
the same memory with a history of its own, and keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge


class _Cut(torch.autograd.Function):  # type: ignore[misc]
    """The same memory, with a history that starts here."""

    @staticmethod
    def forward(_: Any, token: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return value.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        TURN.ended = time.perf_counter()
        return None, None


@dataclass
class Turn:
    """When backward began and ended in the thread that runs it (s); that thread is not the caller's on a GPU, and to
    hand over and back takes longer than many a node. A cut has the oldest history of a node, so it comes last."""

    began: float = 0.0
    ended: float = 0.0

    def begin(self, _: Any) -> None:
        """A function of the node is about to run."""
        self.began = self.began or time.perf_counter()

    def take_ms(self) -> float | None:
        """What passed between, if both were seen; the next turn starts anew."""
        passed = (self.ended - self.began) * 1e3 if self.began and self.ended else None
        self.began = self.ended = 0.0
        return passed


TURN = Turn()
TOKEN = torch.zeros((), requires_grad=True)  # to ask for its gradient is to have cuts called


def cut(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory that takes a gradient."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return cut(value)
    found: torch.Tensor = _Cut.apply(TOKEN, value)
    return found


def stamp(roots: Sequence[GradientEdge], ends: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have `TURN` told when backward from some roots begins and ends; the ends to ask gradients for."""
    TURN.take_ms()
    for node in {edge.node for edge in roots}:
        node.register_prehook(TURN.begin)
    return (*ends, TOKEN)
