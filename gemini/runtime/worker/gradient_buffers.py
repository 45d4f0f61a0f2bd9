"""Gradients of parameters while a step runs: summed up in memory that the controller maps.

A worker adds the gradient of every micro-batch to one piece of shared memory. After the step the controller gets the
place of that memory, not a copy. It comes back to the pool when the last tensor that looks at it is gone there, so a
gradient that the program still holds is never written again.

Small gradients of one worker share a piece, the *shelf*; it comes back when the last of them is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from gemini.runtime.transport import tensor_header
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.shm_pool import ALIGN, Slab
from gemini.runtime.transport.tensor_header import TensorPart
from gemini.runtime.transport.tensor_transport import DeviceBuffers

_SMALL = 64 << 10  # bytes


class SharedGradient(NamedTuple):
    """A gradient in shared memory."""

    parameter: torch.Tensor
    sum: torch.Tensor
    line: int
    header: Any


class BufferLayout(NamedTuple):
    """Where gradients lie: on the shelf, or each in a piece of its own."""

    size: int  # bytes of the shelf
    small: dict[int, TensorPart]  # by identity of the parameter
    large: dict[int, TensorPart]

    @staticmethod
    def made(parameters: Iterable[torch.Tensor]) -> BufferLayout:
        """For those of some parameters."""
        end = 0
        small: dict[int, TensorPart] = {}
        large: dict[int, TensorPart] = {}
        for parameter in {id(one): one for one in parameters}.values():
            if parameter.layout is not torch.strided:
                continue
            if 0 < parameter.nbytes <= _SMALL:
                small[id(parameter)] = TensorPart.like(parameter.detach(), end)
                end += -(-parameter.nbytes // ALIGN) * ALIGN
            else:
                large[id(parameter)] = TensorPart.like(parameter.detach())
        return BufferLayout(end, small, large)


class GradientBuffers:
    """The gradients of one worker in one step; also set as `grad` of the parameters, where autograd adds to them."""

    def __init__(self, link: Link, places: BufferLayout) -> None:
        self.link, self.places = link, places
        self._lent: dict[int, SharedGradient] = {}
        self._shelf: tuple[Slab, torch.Tensor] | None = None

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

    def _lend(self, parameter: torch.Tensor) -> SharedGradient:
        at, line = self._line(parameter)
        part = None if at else self.places.small.get(id(parameter))
        if part is None:
            own = self.places.large.get(id(parameter)) or TensorPart.like(parameter.detach())
            size = max(parameter.nbytes, 1)
            slab = line.pool.take(size)
            header, total = own.on(slab, line.pool.view(slab, size))
        else:
            if self._shelf is None:
                slab = line.pool.take(self.places.size)
                self._shelf = slab, line.pool.view(slab, self.places.size)
            header, total = part.on(*self._shelf)
        lent = self._lent[id(parameter)] = SharedGradient(parameter, total, at, header)
        parameter.grad = total
        return lent

    def _line(self, parameter: torch.Tensor) -> tuple[int, DeviceBuffers]:
        lines = self.link.transport.lines
        return next((at, line) for at, line in enumerate(lines) if line.device.owns(parameter))

    def hand_over(self) -> list[SharedGradient]:
        """All gradients, which are the controller's from now on, unless the step fails elsewhere."""
        found = list(self._lent.values())
        for lent in found:
            lent.parameter.grad = None
        return found

    def discard(self) -> None:
        """The step has failed: the memory is free again."""
        slabs = {(lent.line, *slab) for lent in self.hand_over() for slab in tensor_header.slabs_of(lent.header)}
        for line, *slab in slabs:
            self.link.transport.lines[line].pool.release([Slab(*slab)])
        self._lent, self._shelf = {}, None
