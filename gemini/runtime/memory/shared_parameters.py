"""The household: the tensors of a model that have a home in shared memory, and who knows of them.

A tensor lives on the device of the workers that use it. One that the program has replaced (`p.data = other`,
`model.half()`) is brought home again before it is used from afar: its contents are copied into its home if they fit
there, else it gets another home. So it does where the program still looks at the memory of its home, as a copy of
weights does that is put back after an evaluation (`backup = p.data; p.data = average; …; p.data = backup`): homes that
a tensor has had are kept, and one that it is put back into is its home again. One that the program has taken to another
device stays there, and so does its module.
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

_AT_ONCE = 256 << 20  # bytes that are moved together: for that long they are there twice
_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors look at a storage


class _FormerStorage(NamedTuple):
    """A home that a tensor has, or had once."""

    view: torch.Tensor
    place: MemoryPosition
    number: int


class _Worker(Protocol):
    """A worker process, for the tensors that it maps."""

    link: Link
    device: Device
    is_remote: bool


class TensorMapper(Protocol):
    """The worker pool, for the tensors that its workers map."""

    @property
    def workers(self) -> Sequence[_Worker]:
        """All workers, by place."""
        ...

    def place(self, segment: Segment, homes: list[TensorLayout], device: str) -> int:
        """Map tensors of a segment in the workers of a device; the number of the first."""
        ...

    def forget(self, units: list[int], homes: list[int], segments: list[Segment]) -> None:
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
    held: list[torch.Tensor]  # its parameters and buffers


class SharedParameters:
    """Homes of tensors, under the same numbers in all processes."""

    def __init__(self, pool: TensorMapper, outside: torch.device) -> None:
        self.pool = pool
        self.lock = threading.RLock()  # whoever sees to it that tensors are at home
        self.outside = outside  # where the program has put the model
        self.tensors: dict[int, torch.Tensor] = {}  # held, so that no identity is reused
        self.views: dict[int, torch.Tensor] = {}  # the memory of each home
        self.places: dict[int, MemoryPosition] = {}
        self.devices: dict[int, str] = {}  # whose memory it is
        self.relocations = 0  # times that tensors got another home: whoever was told before knows the old ones
        self.units: list[int] = []  # numbers of units that workers have
        self._numbers: list[int] = []
        self._number_of: dict[int, int] = {}  # the last, by identity
        self._had: dict[int, list[_FormerStorage]] = {}  # homes of tensors that have another one now
        self._segments: list[Segment] = []
        links = [worker.link for worker in pool.workers]
        weakref.finalize(self, _leave, pool, links, self.units, self._numbers, self._segments).atexit = False

    def take_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give a home to those that have none, where all workers compute on the device that they are on anyway."""
        devices = {worker.device.name: worker.device for worker in self.pool.workers}
        if len(devices) == 1 and not self.pool.workers[0].is_remote:
            (device,) = devices.values()
            self._take_in([t for t in tensors if id(t) not in self.devices and device.owns(t)], device)

    def _take_in(self, tensors: list[torch.Tensor], device: Device) -> None:
        self.relocations += any(id(tensor) in self.tensors for tensor in tensors)
        for tensor in tensors:
            self._leave_home(tensor, device)
        for group in _groups([tensor for tensor in tensors if can_share(tensor)]):
            segment, homes = move_to_segment(group, device)
            self._segments.append(segment)
            first = self.pool.place(segment, [homes[id(tensor)] for tensor in group], device.name)
            for number, tensor in enumerate(group, first):
                self._numbers.append(number)
                self.tensors[id(tensor)] = tensor
                self.devices[id(tensor)] = device.name
                self.views[id(tensor)] = tensor.detach()
                (self.places[id(tensor)],) = memory_positions([tensor])
                self._number_of[id(tensor)] = number
                self._is_at_home(tensor, device)
            device.trim()
        if device.where != self.outside:
            move_optimizer_state(tensors)

    def ensure_shared(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        """See to it that all are at home on a device; whether one has another home now, so that workers must be told.

        Raises Astray where one cannot be.
        """
        if self._are_at_home(tensors, device):
            return False  # as nearly always
        with self.lock:  # micro-batches have a thread each, and all of them come here
            return not self._are_at_home(tensors, device) and self._bring_home(tensors, device)

    def _are_at_home(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        identities = [*map(id, tensors)]
        if memory_positions(tensors) != [*map(self.places.get, identities)]:
            return False
        return {*map(self.devices.get, identities)} <= {device.name}

    def _bring_home(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        homeless, moves = [], self.relocations
        places, devices, name = self.places, self.devices, device.name
        now = memory_positions(tensors)
        ours = self._our_looks()
        for tensor, place in zip(tensors, now, strict=True):
            if places.get(id(tensor)) == place and devices[id(tensor)] == name:
                continue
            self._check(tensor, device)
            view = self.views.get(id(tensor))
            if self._return(tensor, device, partial(_was_at, place)):
                continue  # it is there already
            if view is not None and _is_free(view, tensor, ours):
                view.copy_(tensor.detach())
                tensor.data = view
                self._is_at_home(tensor, device)
            elif not self._return(tensor, device, partial(_was_free, tensor, ours)):
                homeless.append(tensor)
        if homeless:
            self._take_in(homeless, device)
        return self.relocations != moves

    def _our_looks(self) -> Counter[int]:
        """How many homes each storage has: tensors of the model that share memory have homes that do."""
        former = (had.view for homes in self._had.values() for had in homes)
        return Counter(view.untyped_storage()._cdata for view in (*self.views.values(), *former))

    def _leave_home(self, tensor: torch.Tensor, device: Device) -> None:
        """The tensor gets another home; this one is kept, for the program may put it back there."""
        if self.devices.get(id(tensor)) == device.name:
            had = _FormerStorage(self.views[id(tensor)], self.places[id(tensor)], self._number_of[id(tensor)])
            self._had.setdefault(id(tensor), []).append(had)

    def _return(self, tensor: torch.Tensor, device: Device, suits: Callable[[_FormerStorage], bool]) -> bool:
        """Whether it goes to a home that it had before: the first that suits."""
        homes = self._had.get(id(tensor), [])
        at = next((at for at, had in enumerate(homes) if suits(had)), None)
        if at is None:
            return False
        had = homes.pop(at)
        if memory_positions([tensor]) != [had.place]:
            had.view.copy_(tensor.detach())
            tensor.data = had.view
        self._leave_home(tensor, device)
        self.views[id(tensor)], self.places[id(tensor)], self._number_of[id(tensor)] = had
        self._is_at_home(tensor, device)
        self.relocations += 1
        return True

    def _is_at_home(self, tensor: torch.Tensor, device: Device) -> None:
        """Workers of a device find it where this household has it: another model's may have had it meanwhile."""
        for worker in self.pool.workers:
            if worker.device.name == device.name:
                worker.link.held[id(tensor)] = self._number_of[id(tensor)]

    def _check(self, tensor: torch.Tensor, device: Device) -> None:
        owner = self.devices.get(id(tensor), device.name)
        if owner != device.name:
            raise MisplacedTensor(f"it shares a tensor with a module on {owner}")
        if tensor.device not in (device.where, self.outside) or (
            id(tensor) in self.devices and not device.owns(tensor)
        ):
            raise MisplacedTensor(f"the program has taken it to {tensor.device}")

    def let_go(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Tensors that no worker uses now, or all, go back to where the program had them."""
        for tensor in list(self.tensors.values()) if tensors is None else tensors:
            if id(tensor) in self.devices and tensor.device != self.outside:
                self.devices.pop(id(tensor))
                self.views.pop(id(tensor))
                self.places.pop(id(tensor))
                self._had.pop(id(tensor), None)
                for worker in self.pool.workers:
                    worker.link.held.pop(id(tensor), None)
                tensor.data = tensor.data.to(self.outside)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(self.outside)


def _leave(
    pool: TensorMapper, links: list[Link], units: list[int], numbers: list[int], segments: list[Segment]
) -> None:
    """The model is gone: its tensors' identities may soon be those of others."""
    gone = set(numbers)
    for link in links:
        link.held = {key: number for key, number in link.held.items() if number not in gone}
    pool.forget(units, numbers, segments)


def _is_free(view: torch.Tensor, tensor: torch.Tensor, ours: Counter[int]) -> bool:
    """Whether a tensor that is elsewhere fits into a home, and the program does not look at that memory any more."""
    handle = view.untyped_storage()  # it counts as well
    homes = ours[handle._cdata]  # and for each we and, but for this one, a tensor of the model
    return _alike(view, tensor) and (_count is None or _count(handle._cdata) <= 2 * homes)


def _was_free(tensor: torch.Tensor, ours: Counter[int], had: _FormerStorage) -> bool:
    return _is_free(had.view, tensor, ours)


def _was_at(place: MemoryPosition, had: _FormerStorage) -> bool:
    return had.place == place


def _alike(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (view.dtype, view.shape, view.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


def _groups(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors in groups of bounded size; those that share a storage are in one."""
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
