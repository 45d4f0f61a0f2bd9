"""Gradient buffers: gradients of parameters, summed during a step in memory that the controller maps.

A worker adds the gradient of every micro-batch to one shared buffer. After the step the controller gets the location
of that buffer, not a copy. The buffer returns to the pool when the controller's last tensor on it is freed, so a
gradient that the script still holds is never overwritten.

Small gradients of one worker share a slab, the *shelf*; it returns when the last of them is freed. So do the gradients
of divided parameters, to which all shards of a group write (`group_gradients`).
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
from gemini.runtime.worker.group_gradients import GroupGradients

_SMALL = 64 << 10  # bytes


class SharedGradient(NamedTuple):
    """A gradient in shared memory."""

    parameter: torch.Tensor
    sum: torch.Tensor
    device: int
    header: Any


class BufferLayout(NamedTuple):
    """Where gradients lie: on the shelf, or each in its own slab."""

    size: int  # bytes of the shelf
    small: dict[int, TensorPart]  # by identity of the parameter
    large: dict[int, TensorPart]

    @staticmethod
    def build(parameters: Iterable[torch.Tensor]) -> BufferLayout:
        """Lay out the gradients of some parameters."""
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


class LooseGradients:
    """The gradients of one worker in one step, where no memory is shared: they travel like any other tensor."""

    group: GroupGradients | None = None

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the tensor to add to, and whether it is empty and must be overwritten."""
        had = parameter.grad
        if had is not None:
            return had, False
        made = parameter.grad = torch.empty_like(parameter, requires_grad=False)
        return made, True

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Do nothing: gradients stay where autograd has allocated them."""

    def is_loose(self, gradient: torch.Tensor) -> bool:  # noqa: ARG002
        """Whether a gradient travels with the reply: all do."""
        return True

    def hand_over(self) -> list[SharedGradient]:
        """Return nothing: all gradients are among the tensors of the reply."""
        return []

    def withhold(self, parameters: Iterable[torch.Tensor]) -> None:
        """Free the gradients of parameters that another shard reports."""
        for parameter in parameters:
            parameter.grad = None

    def discard(self) -> None:
        """Free the gradients of a failed step."""
        for parameter in self._parameters:
            parameter.grad = None


class GradientBuffers:
    """The gradients of one worker in one step; also set as `grad` of the parameters, to which autograd adds."""

    def __init__(self, link: Link, layout: BufferLayout, group: GroupGradients | None = None) -> None:
        self.link, self.layout, self.group = link, layout, group
        self._shared: dict[int, SharedGradient] = {}
        self._shelf: tuple[Slab, torch.Tensor] | None = None

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the buffer to add to, and whether it is empty and must be overwritten."""
        shared = self._shared.get(id(parameter))
        if shared is not None:
            return shared.sum, False
        had = parameter.grad
        shared = self._allocate(parameter)
        if had is not None:  # accumulated by autograd meanwhile
            shared.sum.copy_(had)
        return shared.sum, had is None

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Move gradients that autograd has allocated into buffers, to which it adds from now on."""
        for parameter in parameters:
            made = parameter.grad
            if made is not None and id(parameter) not in self._shared and made.layout is torch.strided:
                self._allocate(parameter).sum.copy_(made)

    def _allocate(self, parameter: torch.Tensor) -> SharedGradient:
        if self.group is not None and id(parameter) in self.group.layout.parts:
            header, total = self.group.whole(parameter)
            shared = self._shared[id(parameter)] = SharedGradient(parameter, total, 0, header)
            parameter.grad = total
            return shared
        at, buffers = self._device_buffers(parameter)
        part = None if at else self.layout.small.get(id(parameter))
        if part is None:
            own = self.layout.large.get(id(parameter)) or TensorPart.like(parameter.detach())
            size = max(parameter.nbytes, 1)
            slab = buffers.pool.take(size)
            header, total = own.on(slab, buffers.pool.view(slab, size))
        else:
            if self._shelf is None:
                slab = buffers.pool.take(self.layout.size)
                self._shelf = slab, buffers.pool.view(slab, self.layout.size)
            header, total = part.on(*self._shelf)
        shared = self._shared[id(parameter)] = SharedGradient(parameter, total, at, header)
        parameter.grad = total
        return shared

    def _device_buffers(self, parameter: torch.Tensor) -> tuple[int, DeviceBuffers]:
        devices = enumerate(self.link.transport.buffers)
        return next((at, buffers) for at, buffers in devices if buffers.device.owns(parameter))

    def is_loose(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient travels with the reply: the controller maps those of dense layout."""
        return gradient.layout is not torch.strided

    def hand_over(self) -> list[SharedGradient]:
        """Return all gradients, which belong to the controller from now on, unless the step fails in another worker."""
        found = list(self._shared.values())
        for shared in found:
            shared.parameter.grad = None
        return found

    def withhold(self, parameters: Iterable[torch.Tensor]) -> None:
        """Free the gradients of parameters that another shard reports."""
        found = [self._shared.pop(id(one), None) for one in parameters]
        for shared in found:
            if shared is not None:
                shared.parameter.grad = None
        kept = {(one.device, *slab) for one in self._shared.values() for slab in tensor_header.slabs_of(one.header)}
        free = {
            (one.device, *slab) for one in found if one is not None for slab in tensor_header.slabs_of(one.header)
        } - kept
        for device, *slab in free:
            self.link.transport.buffers[device].pool.release([Slab(*slab)])

    def discard(self) -> None:
        """Free the buffers of a failed step."""
        slabs = {
            (shared.device, *slab) for shared in self.hand_over() for slab in tensor_header.slabs_of(shared.header)
        }
        if self.group is not None:
            slabs |= {(0, *slab) for slab in self.group.release()}
        for device, *slab in slabs:
            self.link.transport.buffers[device].pool.release([Slab(*slab)])
        self._shared, self._shelf = {}, None
