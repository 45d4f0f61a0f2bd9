"""Homes: where the tensors of a model live, so that all processes work on the same memory.

Parameters and buffers move into a segment of a device's memory that the controller makes and workers open. The
`Parameter` objects of the program stay what they are: only their storage is another, so optimizers made before keep
working, and what `optimizer.step()` writes is at once what the workers read. Each tensor has a storage of its own
(tensors that shared one still do), so that saving a parameter saves that parameter and no more.

The controller makes the memory on GPUs as well: it then outlives any worker, and a worker that is killed takes nothing
of the model with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.transport.tensor_layout import TensorLayout

_ALIGN = 64
_ADDRESS, _SHAPE, _STRIDES = torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride
_IS_DENSE = torch.Tensor.is_contiguous
MemoryPosition = tuple[int, torch.Size, tuple[int, ...]]


class MisplacedTensor(Exception):
    """A tensor cannot be where a worker would need it: its module runs in the program's process."""


def memory_positions(tensors: Sequence[torch.Tensor]) -> list[MemoryPosition]:
    """Where tensors are in memory, and how they lie there: `.data` may give one another form in the same place."""
    return [*zip(map(_ADDRESS, tensors), map(_SHAPE, tensors), map(_STRIDES, tensors), strict=True)]


class TensorPositions:
    """Where tensors are that are looked at again and again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._places = tensors, memory_positions(tensors)
        self._addresses, self._dense = [place for place, _, _ in self._places], [*map(_IS_DENSE, tensors)]

    def hold(self, *, have_shapes: bool = False) -> bool:
        """Whether the tensors are there still, and lie as they did; `have_shapes`: they have those that they had."""
        if not have_shapes or not all(self._dense):
            return memory_positions(self._tensors) == self._places
        return [*map(_ADDRESS, self._tensors)] == self._addresses and all(map(_IS_DENSE, self._tensors))


def can_share(tensor: torch.Tensor) -> bool:
    """Whether a tensor can live in memory that processes share."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and not tensor.is_inference()
    )


def plan_layout(tensors: Iterable[torch.Tensor]) -> tuple[int, list[TensorLayout]]:
    """Places in a segment for tensors that can move, each once; the size of the segment, and the homes in order.

    Tensors that share a storage get homes that share one.
    """
    places: dict[int, tuple[int, int]] = {}  # storage → offset, size
    end = 0
    homes = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in places:
            places[storage._cdata] = (end, storage.nbytes())
            end += -(-max(storage.nbytes(), 1) // _ALIGN) * _ALIGN
        homes.append(TensorLayout(
            *places[storage._cdata], tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()),
            tensor.storage_offset(), isinstance(tensor, nn.Parameter), tensor.requires_grad,
        ))  # fmt: skip
    return max(end, _ALIGN), homes


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def move_to_segment(tensors: Iterable[torch.Tensor], device: Device) -> tuple[Segment, dict[int, TensorLayout]]:
    """Give tensors a home in a new segment; they keep their identity. Returns the homes by `id` of the tensor."""
    moving = list({id(tensor): tensor for tensor in tensors if can_share(tensor)}.values())
    size, homes = plan_layout(moving)
    with torch.inference_mode(False):  # else, moved in a program's evaluation, they could not be trained any more
        segment = device.allocate(size)
        opened: dict[int, torch.Tensor] = {}
        for tensor, home in zip(moving, homes, strict=True):
            if home.offset not in opened:
                opened[home.offset] = segment.view(home.offset, home.size)
                opened[home.offset].copy_(storage_bytes(tensor))
        for tensor, home in zip(moving, homes, strict=True):
            tensor.data = home.look(opened[home.offset])
            if tensor.grad is not None and tensor.grad.device != tensor.device:
                tensor.grad = tensor.grad.to(tensor.device)
    return segment, {id(tensor): home for tensor, home in zip(moving, homes, strict=True)}
