"""Shared layout: moves the tensors of a model into memory that all processes map.

Parameters and buffers move into a segment of device memory that the controller allocates and workers open. Tensors and
storages of the script stay the same: only the memory of a storage is exchanged, so views, state dicts and optimizers
move along, workers read what `optimizer.step()` writes, and saving a parameter saves only that parameter. Where the
workers are on another device, the tensor gets a new storage.

The controller allocates GPU memory as well: it outlives every worker, and a killed worker takes nothing of the model
with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.memory.storage_exchange import exchange
from gemini.runtime.transport.tensor_layout import TensorLayout

_ALIGN = 64
_ADDRESS, _SHAPE, _STRIDES = torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride
_IS_DENSE = torch.Tensor.is_contiguous
MemoryPosition = tuple[int, torch.Size, tuple[int, ...]]
_moved: weakref.WeakValueDictionary[tuple[int, int], torch.UntypedStorage] = weakref.WeakValueDictionary()


class MisplacedTensor(Exception):
    """A tensor cannot be where a worker would need it: its module runs in the controller."""


def memory_positions(tensors: Sequence[torch.Tensor]) -> list[MemoryPosition]:
    """Return address, shape and strides of tensors: `.data` may change the layout at the same address."""
    return [*zip(map(_ADDRESS, tensors), map(_SHAPE, tensors), map(_STRIDES, tensors), strict=True)]


class TensorPositions:
    """The memory positions of tensors that are checked repeatedly."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._places = tensors, memory_positions(tensors)
        self._addresses, self._dense = [place for place, _, _ in self._places], [*map(_IS_DENSE, tensors)]

    def hold(self, *, have_shapes: bool = False) -> bool:
        """Return whether the tensors are still there, with the same layout; `have_shapes`: their shapes hold."""
        if not have_shapes or not all(self._dense):
            return memory_positions(self._tensors) == self._places
        return [*map(_ADDRESS, self._tensors)] == self._addresses and all(map(_IS_DENSE, self._tensors))


def can_share(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can live in memory that processes share."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and not tensor.is_inference()
    )


def plan_layout(tensors: Iterable[torch.Tensor]) -> tuple[int, list[TensorLayout]]:
    """Lay tensors out in a segment, each once; return its size and the layouts in order.

    Tensors that share a storage get layouts that share one.
    """
    places: dict[int, tuple[int, int]] = {}  # storage → offset, size
    end = 0
    layouts = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in places:
            places[storage._cdata] = (end, storage.nbytes())
            end += -(-max(storage.nbytes(), 1) // _ALIGN) * _ALIGN
        layouts.append(TensorLayout(
            *places[storage._cdata], tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()),
            tensor.storage_offset(), isinstance(tensor, nn.Parameter), tensor.requires_grad,
        ))  # fmt: skip
    return max(end, _ALIGN), layouts


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def exchange_memory(storages: Sequence[torch.UntypedStorage], others: Sequence[torch.UntypedStorage]) -> None:
    """Give storages the memory of others, which is part of segments, and the others theirs."""
    exchange(storages, others)
    _moved.update({(storage._cdata, storage.data_ptr()): storage for storage in storages})


def is_in_segment(storage: torch.UntypedStorage) -> bool:
    """Return whether the memory of a storage is part of a segment that it was moved to."""
    return _moved.get((storage._cdata, storage.data_ptr())) is not None


def move_to_segment(tensors: Iterable[torch.Tensor], device: Device) -> tuple[Segment, dict[int, TensorLayout]]:
    """Move tensors into a new segment; they keep their identity. Return the layouts by `id` of the tensor.

    Everything on their storages moves along, unless the device is another one.
    """
    moving = list({id(tensor): tensor for tensor in tensors if can_share(tensor)}.values())
    size, layouts = plan_layout(moving)
    with torch.inference_mode(False):  # tensors moved in inference mode could not be trained afterwards
        segment = device.allocate(size)
        opened: dict[int, torch.Tensor] = {}
        former: dict[int, torch.Tensor] = {}
        for tensor, layout in zip(moving, layouts, strict=True):
            if layout.offset not in opened:
                opened[layout.offset] = segment.view(layout.offset, layout.size)
                former[layout.offset] = storage_bytes(tensor)
                opened[layout.offset].copy_(former[layout.offset])
        staying = [at for at in opened if opened[at].device == former[at].device and opened[at].numel()]
        exchange_memory(
            [former[at].untyped_storage() for at in staying], [opened[at].untyped_storage() for at in staying]
        )
        for tensor, layout in zip(moving, layouts, strict=True):
            if tensor.device != device.where:
                tensor.data = layout.view(opened[layout.offset])
            if tensor.grad is not None and tensor.grad.device != tensor.device:
                tensor.grad = tensor.grad.to(tensor.device)
    return segment, {id(tensor): layout for tensor, layout in zip(moving, layouts, strict=True)}
