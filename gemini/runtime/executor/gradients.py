"""Gradients of parameters while a step runs: summed up in memory that the controller maps.

A worker adds the gradient of every micro-batch to one piece of shared memory. After the step the controller gets the
place of that memory, not a copy. It comes back to the pool when the last tensor that looks at it is gone there, so a
gradient that the program still holds is never written again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from gemini.runtime.transport import tensors
from gemini.runtime.transport.carriage import Line
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.slabs import Slab


class Lent(NamedTuple):
    """A gradient in shared memory."""

    parameter: torch.Tensor
    sum: torch.Tensor
    line: int
    header: Any


class Gradients:
    """The gradients of one worker in one step; also set as `grad` of the parameters, where autograd adds to them."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lent: dict[int, Lent] = {}

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The memory to add to, and whether it holds nothing yet and is to be overwritten."""
        lent = self._lent.get(id(parameter))
        if lent is not None:
            return lent.sum, False
        had = parameter.grad
        lent = self._lend(parameter)
        if had is not None:  # what autograd has given in the meantime
            lent.sum.copy_(had)
        return lent.sum, had is None

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take over gradients that autograd has made anew; from now on it adds to them."""
        for parameter in parameters:
            made = parameter.grad
            if made is not None and id(parameter) not in self._lent and made.layout is torch.strided:
                self._lend(parameter).sum.copy_(made)

    def _lend(self, parameter: torch.Tensor) -> Lent:
        at, line = self._line(parameter)
        header, total = tensors.lend(line.pool, parameter.detach())
        lent = self._lent[id(parameter)] = Lent(parameter, total, at, header)
        parameter.grad = total
        return lent

    def _line(self, parameter: torch.Tensor) -> tuple[int, Line]:
        lines = self.link.carriage.lines
        return next((at, line) for at, line in enumerate(lines) if line.device.owns(parameter))

    def hand_over(self) -> list[Lent]:
        """All gradients, which are the controller's from now on, unless the step fails elsewhere."""
        found = list(self._lent.values())
        for lent in found:
            lent.parameter.grad = None
        return found

    def discard(self) -> None:
        """The step has failed: the memory is free again."""
        for lent in self.hand_over():
            self.link.carriage.lines[lent.line].pool.release([Slab(*slab) for slab in tensors.slabs(lent.header)])
        self._lent = {}
