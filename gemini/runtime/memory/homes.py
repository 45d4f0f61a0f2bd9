"""Homes: where the tensors of a model live, so that all processes work on the same memory.

Parameters and buffers move into one anonymous segment that the controller makes and workers map. The `Parameter`
objects of the program stay what they are: only their storage is another, so optimizers made before keep working, and
what `optimizer.step()` writes is at once what the workers read. Each tensor has a storage of its own (tensors that
shared one still do), so that saving a parameter saves that parameter and no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from gemini.runtime.transport.slabs import Segment

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
        """The tensor, in the process that has mapped the segment."""
        storage = _storage(segment, self.offset, self.size)
        found = torch.empty(0, dtype=self.dtype).set_(storage, self.start, self.shape, self.stride)
        return nn.Parameter(found, self.requires_grad) if self.is_parameter else found


def can_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor can live in shared memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and not tensor.is_inference()
    )


def move_in(tensors: Iterable[torch.Tensor]) -> tuple[Segment, dict[int, Home]]:
    """Give tensors a home in a new segment; they keep their identity. Returns the homes by `id` of the tensor."""
    moving = list({id(tensor): tensor for tensor in tensors if can_move(tensor)}.values())
    places: dict[int, tuple[int, int]] = {}  # storage → offset, size
    end = 0
    for tensor in moving:
        storage = tensor.untyped_storage()
        if storage._cdata not in places:
            places[storage._cdata] = (end, storage.nbytes())
            end += -(-max(storage.nbytes(), 1) // _ALIGN) * _ALIGN
    segment = Segment(max(end, _ALIGN))
    opened: dict[int, torch.UntypedStorage] = {}
    homes = {}
    for tensor in moving:
        old = tensor.untyped_storage()
        offset, size = places[old._cdata]
        if offset not in opened:
            opened[offset] = _storage(segment, offset, size)
            opened[offset].copy_(old)
        homes[id(tensor)] = Home(
            offset, size, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(),
            isinstance(tensor, nn.Parameter), tensor.requires_grad,
        )  # fmt: skip
    for tensor in moving:
        home = homes[id(tensor)]
        tensor.data = torch.empty(0, dtype=home.dtype).set_(opened[home.offset], home.start, home.shape, home.stride)
    return segment, homes


def _storage(segment: Segment, offset: int, size: int) -> torch.UntypedStorage:
    if not size:
        return torch.empty(0, dtype=torch.uint8).untyped_storage()
    memory = memoryview(segment.memory)[offset : offset + size]
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
