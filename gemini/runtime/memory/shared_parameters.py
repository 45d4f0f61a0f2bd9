"""Shared parameters: the tensors of a model in memory that its workers map.

A tensor lives on the device of the workers that use it. One that the script has replaced (`p.data = other`,
`model.half()`) is moved back into shared memory before workers use it: its contents are copied into its shared storage
if they fit, else it gets a new one. It also gets a new one while the script still references the memory of the shared
storage, as a copy of weights does that is restored after an evaluation (`backup = p.data; p.data = average; …;
p.data = backup`): former shared storages are retained, and one that the tensor returns to becomes current again. A
tensor that the script has moved to another device stays there, and its module runs in the controller.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.memory.optimizer_state import move_optimizer_state
from gemini.runtime.memory.shared_layout import (
    MemoryPosition,
    MisplacedTensor,
    can_share,
    memory_positions,
    move_to_segment,
)
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.tensor_layout import TensorLayout

_AT_ONCE = 256 << 20  # bytes that are moved at once, and exist twice meanwhile
_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # the number of tensors on a storage


class _FormerStorage(NamedTuple):
    """A shared storage that a tensor has, or had before."""

    view: torch.Tensor
    position: MemoryPosition
    number: int


class _MappingWorker(Protocol):
    """A worker process, for the tensors that it maps."""

    link: Link
    device: Device
    is_remote: bool


class TensorMapper(Protocol):
    """The worker pool, for the tensors that its workers map."""

    @property
    def workers(self) -> Sequence[_MappingWorker]:
        """All workers, by index."""
        ...

    def map_tensors(self, segment: Segment, layouts: list[TensorLayout], device: str) -> int:
        """Map tensors of a segment in the workers of a device; return the number of the first."""
        ...

    def forget_model(self, modules: list[int], tensors: list[int], segments: list[Segment]) -> None:
        """Note that a model is gone, with its modules, tensors and segments."""
        ...

    def flush_forgotten(self) -> None:
        """Send what was noted to the workers."""
        ...


class PlacedModule(Protocol):
    """A module of the model with the worker that runs it."""

    number: int
    name: str
    module: nn.Module
    shared_parameters: SharedParameters
    tensors: list[torch.Tensor]  # its parameters and buffers


class SharedParameters:
    """The shared storage of each tensor of a model, under the same numbers in all processes."""

    def __init__(self, pool: TensorMapper, model_device: torch.device) -> None:
        self.pool = pool
        self.lock = threading.RLock()  # held while tensors are moved
        self.model_device = model_device  # where the script has put the model
        self.tensors: dict[int, torch.Tensor] = {}  # referenced, so that no identity is reused
        self.views: dict[int, torch.Tensor] = {}  # of the shared storages
        self.positions: dict[int, MemoryPosition] = {}
        self.devices: dict[int, str] = {}  # the device of each shared storage
        self.relocations = 0  # times that tensors got a new storage; workers installed before use the old ones
        self.module_numbers: list[int] = []  # of the modules that workers run
        self._numbers: list[int] = []
        self._number_of: dict[int, int] = {}  # the current one, by identity
        self._former: dict[int, list[_FormerStorage]] = {}  # former storages, by identity
        self._segments: list[Segment] = []
        links = [worker.link for worker in pool.workers]
        weakref.finalize(self, _leave, pool, links, self.module_numbers, self._numbers, self._segments).atexit = False

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move tensors into shared memory, if all workers compute on the device that the tensors are on anyway."""
        devices = {worker.device.name: worker.device for worker in self.pool.workers}
        if len(devices) == 1 and not self.pool.workers[0].is_remote:
            (device,) = devices.values()
            self._share([t for t in tensors if id(t) not in self.devices and device.owns(t)], device)

    def _share(self, tensors: list[torch.Tensor], device: Device) -> None:
        self.relocations += any(id(tensor) in self.tensors for tensor in tensors)
        for tensor in tensors:
            self._retain_storage(tensor, device)
        for group in _groups([tensor for tensor in tensors if can_share(tensor)]):
            segment, layouts = move_to_segment(group, device)
            self._segments.append(segment)
            first = self.pool.map_tensors(segment, [layouts[id(tensor)] for tensor in group], device.name)
            for number, tensor in enumerate(group, first):
                self._numbers.append(number)
                self.tensors[id(tensor)] = tensor
                self.devices[id(tensor)] = device.name
                self.views[id(tensor)] = tensor.detach()
                (self.positions[id(tensor)],) = memory_positions([tensor])
                self._number_of[id(tensor)] = number
                self._register(tensor, device)
            device.trim()
        if device.where != self.model_device:
            move_optimizer_state(tensors)

    def ensure_shared(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        """Move all tensors to shared memory of a device; return whether one has a new storage.

        Workers must be sent a new storage. Raise MisplacedTensor if a tensor cannot move.
        """
        if self._are_shared(tensors, device):
            return False  # the usual case
        with self.lock:  # each micro-batch has a thread, and all of them call this
            return not self._are_shared(tensors, device) and self._move_to_shared(tensors, device)

    def _are_shared(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        identities = [*map(id, tensors)]
        if memory_positions(tensors) != [*map(self.positions.get, identities)]:
            return False
        return {*map(self.devices.get, identities)} <= {device.name}

    def _move_to_shared(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        unplaced, before = [], self.relocations
        positions, devices, name = self.positions, self.devices, device.name
        now = memory_positions(tensors)
        views_by_storage = self._count_views()
        for tensor, position in zip(tensors, now, strict=True):
            if positions.get(id(tensor)) == position and devices[id(tensor)] == name:
                continue
            self._check(tensor, device)
            view = self.views.get(id(tensor))
            if self._return(tensor, device, partial(_has_position, position)):
                continue  # it is there already
            if view is not None and _is_free(view, tensor, views_by_storage):
                view.copy_(tensor.detach())
                tensor.data = view
                self._register(tensor, device)
            elif not self._return(tensor, device, partial(_suits_contents, tensor, views_by_storage)):
                unplaced.append(tensor)
        if unplaced:
            self._share(unplaced, device)
        return self.relocations != before

    def _count_views(self) -> Counter[int]:
        """Return the number of shared views by storage: tensors of the model that share memory have views that do."""
        former = (one.view for storages in self._former.values() for one in storages)
        return Counter(view.untyped_storage()._cdata for view in (*self.views.values(), *former))

    def _retain_storage(self, tensor: torch.Tensor, device: Device) -> None:
        """Retain the current storage of a tensor that gets a new one: the script may put the tensor back."""
        if self.devices.get(id(tensor)) == device.name:
            former = _FormerStorage(self.views[id(tensor)], self.positions[id(tensor)], self._number_of[id(tensor)])
            self._former.setdefault(id(tensor), []).append(former)

    def _return(self, tensor: torch.Tensor, device: Device, suits: Callable[[_FormerStorage], bool]) -> bool:
        """Move a tensor back to the first former storage that suits; return whether there is one."""
        storages = self._former.get(id(tensor), [])
        at = next((at for at, former in enumerate(storages) if suits(former)), None)
        if at is None:
            return False
        former = storages.pop(at)
        if memory_positions([tensor]) != [former.position]:
            former.view.copy_(tensor.detach())
            tensor.data = former.view
        self._retain_storage(tensor, device)
        self.views[id(tensor)], self.positions[id(tensor)], self._number_of[id(tensor)] = former
        self._register(tensor, device)
        self.relocations += 1
        return True

    def _register(self, tensor: torch.Tensor, device: Device) -> None:
        """Register the tensor's number with the workers of a device: another model may have registered it meanwhile."""
        for worker in self.pool.workers:
            if worker.device.name == device.name:
                worker.link.shared_numbers[id(tensor)] = self._number_of[id(tensor)]

    def _check(self, tensor: torch.Tensor, device: Device) -> None:
        owner = self.devices.get(id(tensor), device.name)
        if owner != device.name:
            raise MisplacedTensor(f"it shares a tensor with a module on {owner}")
        if tensor.device not in (device.where, self.model_device) or (
            id(tensor) in self.devices and not device.owns(tensor)
        ):
            raise MisplacedTensor(f"the script has moved it to {tensor.device}")

    def release(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Move tensors that no worker uses, or all, back to the device on which the script had them."""
        for tensor in list(self.tensors.values()) if tensors is None else tensors:
            if id(tensor) in self.devices and tensor.device != self.model_device:
                self.devices.pop(id(tensor))
                self.views.pop(id(tensor))
                self.positions.pop(id(tensor))
                self._former.pop(id(tensor), None)
                for worker in self.pool.workers:
                    worker.link.shared_numbers.pop(id(tensor), None)
                tensor.data = tensor.data.to(self.model_device)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(self.model_device)


def _leave(
    pool: TensorMapper, links: list[Link], modules: list[int], numbers: list[int], segments: list[Segment]
) -> None:
    """Deregister the tensors of a model that is gone: their identities may be reused."""
    gone = set(numbers)
    for link in links:
        link.shared_numbers = {key: number for key, number in link.shared_numbers.items() if number not in gone}
    pool.forget_model(modules, numbers, segments)


def _is_free(view: torch.Tensor, tensor: torch.Tensor, views_by_storage: Counter[int]) -> bool:
    """Return whether a tensor fits into a shared storage that the script does not reference any more."""
    handle = view.untyped_storage()  # counts as one reference
    views = views_by_storage[handle._cdata]  # each with, except for this one, a tensor of the model
    return _has_layout(view, tensor) and (_count is None or _count(handle._cdata) <= 2 * views)


def _suits_contents(tensor: torch.Tensor, views_by_storage: Counter[int], former: _FormerStorage) -> bool:
    return _is_free(former.view, tensor, views_by_storage)


def _has_position(position: MemoryPosition, former: _FormerStorage) -> bool:
    return former.position == position


def _has_layout(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (view.dtype, view.shape, view.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


def _groups(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in groups of bounded size; those that share a storage are in one group."""
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    group: list[torch.Tensor] = []
    size = 0
    for sharing in storages.values():
        more = sharing[0].untyped_storage().nbytes()
        if group and size + more > _AT_ONCE:
            yield group
            group, size = [], 0
        group += sharing
        size += more
    if group:
        yield group
