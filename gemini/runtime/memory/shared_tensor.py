"""Shared tensor: one tensor at one position in shared memory, under the number by which workers know it.

A tensor whose storage the script replaces (`backup = p.data; p.data = average; …; p.data = backup`) is at several
positions in turn, each a shared tensor of its own. Models that have a tensor in common use the same shared tensors. The
workers forget one when no model uses it any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.memory.shared_layout import MemoryPosition, memory_positions
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.tensor_layout import TensorLayout

if TYPE_CHECKING:
    from gemini.runtime.memory.shared_parameters import SharedParameters


class _MappingWorker(Protocol):
    """A worker process, for the tensors that it maps."""

    link: Link
    device: Device
    is_remote: bool


class TensorMapper(Protocol):
    """The worker pool, for the tensors that its workers map."""

    shared: SharedTable

    @property
    def workers(self) -> Sequence[_MappingWorker]:
        """All workers, by index."""
        ...

    def number_tensors(self, count: int) -> int:
        """Return the first of so many numbers for tensors."""
        ...

    def map_tensors(self, segment: Segment, layouts: list[TensorLayout], device: str) -> int:
        """Map tensors of a segment in the workers of a device; return the number of the first."""
        ...

    def forget_model(self, modules: list[int], tensors: list[int], segments: list[Segment]) -> None:
        """Note that modules, tensors and segments are gone."""
        ...

    def flush_forgotten(self) -> None:
        """Send what was noted to the workers."""
        ...


class SharedTensor:
    """A tensor at a position in a segment."""

    __slots__ = ("__weakref__", "device", "number", "position", "segment", "tensor", "view")

    def __init__(self, pool: TensorMapper, tensor: torch.Tensor, number: int, device: str, segment: Segment) -> None:
        self.tensor, self.number, self.device, self.segment = tensor, number, device, segment
        self.view = tensor.detach()  # holds the storage, also where the script has given the tensor another one
        (self.position,) = memory_positions([tensor])
        links = [worker.link for worker in pool.workers if worker.device.name == device]
        weakref.finalize(self, _forget, pool, links, id(tensor), number, segment).atexit = False

    @property
    def storage(self) -> int:
        """The storage, by its `_cdata`."""
        return int(self.view.untyped_storage()._cdata)

    @property
    def is_there(self) -> bool:
        """Whether the storage has this memory still; the segment is held, so the address is not another's."""
        return bool(self.view.data_ptr() == self.position[0])


def _forget(pool: TensorMapper, links: list[Link], key: int, number: int, segment: Segment) -> None:
    """Deregister a tensor: its identity may be reused."""
    for link in links:
        if link.shared_numbers.get(key) == number:
            link.shared_numbers.pop(key, None)
    pool.forget_model([], [number], [segment])


class SharedTable:
    """The shared tensors of all models of a worker pool, and the models."""

    def __init__(self) -> None:
        self._tensors: weakref.WeakValueDictionary[tuple[str, int, MemoryPosition], SharedTensor] = (
            weakref.WeakValueDictionary()
        )
        self.users: weakref.WeakSet[SharedParameters] = weakref.WeakSet()

    def add(self, shared: SharedTensor) -> None:
        """Add one."""
        self._tensors[shared.device, id(shared.tensor), shared.position] = shared

    def find(self, device: str, tensor: torch.Tensor, position: MemoryPosition) -> SharedTensor | None:
        """Return the shared tensor at a position; None if workers of the device do not know it."""
        found = self._tensors.get((device, id(tensor), position))
        return found if found is not None and found.is_there else None

    def on_storages(self, storages: Iterable[int]) -> Iterator[SharedTensor]:
        """Yield the shared tensors that are on some storages now."""
        wanted = {*storages}
        for shared in [*self._tensors.values()]:
            if shared.storage in wanted and shared.tensor.untyped_storage()._cdata == shared.storage:
                yield shared
