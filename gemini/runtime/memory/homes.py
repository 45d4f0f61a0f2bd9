"""Homes: where the tensors of a model live, so that all processes work on the same memory.

Parameters and buffers move into a segment of a device's memory that the controller makes and workers open. The
`Parameter` objects of the program stay what they are: only their storage is another, so optimizers made before keep
working, and what `optimizer.step()` writes is at once what the workers read. Each tensor has a storage of its own
(tensors that shared one still do), so that saving a parameter saves that parameter and no more.

The controller makes the memory on GPUs as well: it then outlives any worker, and a worker that is killed takes nothing
of the model with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gemini.runtime.devices.base import Device, Segment

_ALIGN = 64


@dataclass(frozen=True)
class Home:
    """The place of one tensor in the segment."""

    offset: int
    size: int  # bytes of its storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # of the tensor in its storage, in elements
    is_parameter: bool
    requires_grad: bool

    def open(self, segment: Segment) -> torch.Tensor:
        """The tensor, in the process that has opened the segment."""
        found = self.look(segment.view(self.offset, self.size))
        return nn.Parameter(found, self.requires_grad) if self.is_parameter else found

    def look(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor in the bytes of its storage."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.start, self.shape, self.stride)


def can_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor can live in memory that processes share."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and not tensor.is_inference()
    )


def move_in(tensors: Iterable[torch.Tensor], device: Device) -> tuple[Segment, dict[int, Home]]:
    """Give tensors a home in a new segment; they keep their identity. Returns the homes by `id` of the tensor."""
    moving = list({id(tensor): tensor for tensor in tensors if can_move(tensor)}.values())
    places: dict[int, tuple[int, int]] = {}  # storage → offset, size
    end = 0
    for tensor in moving:
        storage = tensor.untyped_storage()
        if storage._cdata not in places:
            places[storage._cdata] = (end, storage.nbytes())
            end += -(-max(storage.nbytes(), 1) // _ALIGN) * _ALIGN
    segment = device.allocate(max(end, _ALIGN))
    opened: dict[int, torch.Tensor] = {}
    homes = {}
    for tensor in moving:
        old = tensor.untyped_storage()
        offset, size = places[old._cdata]
        if offset not in opened:
            opened[offset] = segment.view(offset, size)
            opened[offset].copy_(torch.empty(0, dtype=torch.uint8, device=old.device).set_(old))
        homes[id(tensor)] = Home(
            offset, size, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(),
            isinstance(tensor, nn.Parameter), tensor.requires_grad,
        )  # fmt: skip
    for tensor in moving:
        home = homes[id(tensor)]
        tensor.data = home.look(opened[home.offset])
        if tensor.grad is not None and tensor.grad.device != tensor.device:
            tensor.grad = tensor.grad.to(tensor.device)
    return segment, homes
