"""Borrowed buffers: slabs of the other end that are read again in every step, such as those of gradients.

A tensor with its own storage costs several microseconds to create, and a step reads hundreds of them, each time in the
same slabs. A slab therefore stays open after its first use, and each step returns new tensors on the same storage. No
finalizer reports when the last of them is freed; before the next step the use count of each storage is read instead.

    read ──► slab opened, the first time ──► tensors on its storage ──► script: `p.grad`
    collect_idle ──► storages with no reference outside this module: their slabs go back

A slab that the script still references is not returned, so its contents are never overwritten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import compress
from operator import and_, attrgetter, eq, methodcaller, ne
from sys import getrefcount
from typing import Any

import torch

from gemini.runtime.transport.shm_pool import MappedPool
from gemini.runtime.transport.tensor_header import Header, TensorPart

_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # the number of tensors on a storage
ARE_COUNTED = _count is not None
_DATA = attrgetter("data")  # another tensor on the storage, with its own version counter
_ADDRESS = methodcaller("data_ptr")
_STORAGE, _HANDLE = attrgetter("storage"), attrgetter("handle")
_TENSORS, _HANDLES = attrgetter("tensors"), attrgetter("handles")
_AT = attrgetter("address")
_Key = tuple[int, int, int]


class _OpenSlab:
    """An open slab, and the tensors of this module on it, by header."""

    __slots__ = ("address", "handle", "handles", "memory", "size", "storage", "tensors", "views")

    def __init__(self, mapped: MappedPool, slab: _Key, size: int) -> None:
        self.size = size
        # No `freed` callback: the storage lives as long as this object.
        self.memory = mapped.segments[slab[0]].view(slab[1], size)
        self.views: dict[Header, torch.Tensor] = {}
        # A storage has one Python object, which the script may hold without any tensor.
        self.handle = self.memory.untyped_storage()
        self.storage, self.address = self.handle._cdata, self.handle.data_ptr()
        self.tensors: int = _count(self.storage)  # those of this module
        (self.handles,) = _count_handles([self])

    def view(self, header: Header) -> torch.Tensor:
        """Return the cached tensor for a header."""
        if header not in self.views:
            _, _, _, *part = header
            self.views[header] = TensorPart(*part).view(self.memory)
            self.tensors += 1
        return self.views[header]


def _count_handles(opened: Iterable[_OpenSlab]) -> Iterable[int]:
    """Return the reference count of the Python object of each storage; always called with the same extra references."""
    return map(getrefcount, map(_HANDLE, opened))


def _are_idle(opened: list[_OpenSlab]) -> Iterable[bool]:
    """Return for each slab whether only this module references it. A step has dozens of them: all loops run in C."""
    seen = map(eq, map(_count, map(_STORAGE, opened)), map(_TENSORS, opened))
    return map(and_, seen, map(eq, _count_handles(opened), map(_HANDLES, opened)))


def _have_moved(opened: list[_OpenSlab]) -> Iterable[bool]:
    """Return for each slab whether `share_memory_` has given its storage other memory. An idle storage cannot move."""
    return map(ne, map(_ADDRESS, map(_HANDLE, opened)), map(_AT, opened))


class BufferGroup:
    """Tensors that arrive together in every step: their headers, and the slabs opened for them the last time."""

    def __init__(self, headers: Iterable[tuple[int, Header]]) -> None:
        self.headers = list(headers)  # by device
        self.opened: dict[_Key, _OpenSlab] = {}
        self.views: list[torch.Tensor] = []
        self.version = -1  # of the open slabs


class BorrowedBuffers:
    """The borrowed slabs of one mapped pool."""

    def __init__(self, mapped: MappedPool) -> None:
        self.mapped = mapped
        self._open: dict[_Key, _OpenSlab] = {}
        self._version = 0  # changes when a slab is opened again
        self._out: dict[_Key, _OpenSlab] = {}  # that the script may reference
        self._lock = threading.Lock()  # a tensor under construction must not be missed in the count
        self._ready: tuple[BufferGroup, list[torch.Tensor]] | None = None  # created ahead of `read`

    def prepare(self, group: BufferGroup) -> list[torch.Tensor] | None:
        """Return the tensors that the next `read` of this group returns; None if the slabs are not open yet."""
        with self._lock:
            if group.version != self._version:
                return None
            self._ready = group, [*map(_DATA, group.views)]
            return self._ready[1]

    def read(self, group: BufferGroup) -> list[torch.Tensor]:
        """Return the tensors of a group."""
        with self._lock:
            if group.version != self._version:
                self._ready = None
                with torch.inference_mode(False):
                    self._open_all(group)
            self._out.update(group.opened)
            ready, self._ready = self._ready, None
            return ready[1] if ready is not None and ready[0] is group else [*map(_DATA, group.views)]

    def _open_all(self, group: BufferGroup) -> None:
        group.opened, group.views = {}, []
        for _, header in group.headers:
            _, slab, size, *_ = header
            opened = self._open.get(slab)
            if opened is None or opened.size != size:
                if opened is not None:
                    self._version += 1
                opened = self._open[slab] = _OpenSlab(self.mapped, slab, size)
            group.opened[slab] = opened
            group.views.append(opened.view(header))
        group.version = self._version

    def collect_idle(self) -> list[_Key]:
        """Return the slabs without references from the script, in the order in which the pool should reuse them."""
        with self._lock:
            self._ready = None  # it was for a step that failed
            out = [*self._out.values()]
            idle = [*_are_idle(out)]
            found = [*compress(self._out, idle)]
            moved = [*compress(self._out, map(and_, idle, _have_moved(out)))]
            if len(found) == len(self._out):
                self._out.clear()
            for slab in found if self._out else ():
                del self._out[slab]
            for slab in moved:
                del self._open[slab]
                self._version += 1
        return found[::-1]

    def forget(self) -> None:
        """Drop all slabs: the other end is gone, and memory is freed with its last tensor."""
        with self._lock:
            self._open, self._out, self._ready = {}, {}, None
            self._version += 1
