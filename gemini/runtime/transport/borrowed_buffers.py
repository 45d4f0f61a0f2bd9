"""Borrowed buffers: slabs of the other end that are read again in every step, such as those of gradients.

A tensor with its own storage costs several microseconds to create, and a step reads hundreds of them, each time in the
same slabs. The storage of each tensor therefore stays open after its first use, and each step returns new tensors on
it. No finalizer reports when the last of them is freed; before the next step the use count of each storage is read
instead.

    read ──► part of a slab opened, the first time ──► tensors on its storage ──► script: `p.grad`
    collect_idle ──► slabs whose storages have no reference outside this module go back

Tensors in one slab have storages of their own, as gradients under `python` have: a file with one of them holds nothing
else. A slab that the script still references is not returned, so its contents are never overwritten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import compress, filterfalse
from operator import and_, attrgetter, eq, methodcaller, ne, not_
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
_AT, _SLAB, _VIEW = attrgetter("address"), attrgetter("slab"), attrgetter("view")
_Key = tuple[int, int, int]


class _OpenPart:
    """An open part of a slab: the storage of one tensor, and the tensors of this module on it."""

    __slots__ = ("address", "handle", "handles", "header", "slab", "storage", "tensors", "view")

    def __init__(self, mapped: MappedPool, header: Header) -> None:
        _, self.slab, _, *facts = header
        self.header = header
        part = TensorPart(*facts)
        # No `freed` callback: the storage lives as long as this object.
        memory = mapped.segments[self.slab[0]].view(self.slab[1] + part.offset, part.nbytes)
        self.view = part._replace(offset=0).view(memory)
        del memory
        # A storage has one Python object, which the script may hold without any tensor.
        self.handle = self.view.untyped_storage()
        self.storage, self.address = self.handle._cdata, self.handle.data_ptr()
        self.tensors: int = _count(self.storage)  # those of this module
        (self.handles,) = _count_handles([self])


def _count_handles(opened: Iterable[_OpenPart]) -> Iterable[int]:
    """Return the reference count of the Python object of each storage; always called with the same extra references."""
    return map(getrefcount, map(_HANDLE, opened))


def _are_idle(opened: list[_OpenPart]) -> Iterable[bool]:
    """Return for each part whether only this module references it. A step has hundreds of them: loops run in C."""
    seen = map(eq, map(_count, map(_STORAGE, opened)), map(_TENSORS, opened))
    return map(and_, seen, map(eq, _count_handles(opened), map(_HANDLES, opened)))


def _have_moved(opened: list[_OpenPart]) -> Iterable[bool]:
    """Return for each part whether `share_memory_` has given its storage other memory. An idle storage cannot move."""
    return map(ne, map(_ADDRESS, map(_HANDLE, opened)), map(_AT, opened))


class BufferGroup:
    """Tensors that arrive together in every step: their headers, and the parts opened for them the last time."""

    def __init__(self, headers: Iterable[tuple[int, Header]]) -> None:
        self.headers = list(headers)  # by device
        self.opened: dict[_OpenPart, None] = {}
        self.views: list[torch.Tensor] = []
        self.version = -1  # of the open parts


class BorrowedBuffers:
    """The borrowed parts of one mapped pool."""

    def __init__(self, mapped: MappedPool) -> None:
        self.mapped = mapped
        self._open: dict[Header, _OpenPart] = {}
        self._version = 0  # changes when a part is opened again
        self._out: dict[_OpenPart, None] = {}  # that the script may reference
        self._lock = threading.Lock()  # a tensor under construction must not be missed in the count
        self._ready: tuple[BufferGroup, list[torch.Tensor]] | None = None  # created ahead of `read`

    def prepare(self, group: BufferGroup) -> list[torch.Tensor] | None:
        """Return the tensors that the next `read` of this group returns; None if its parts are not open yet."""
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
        found = []
        for _, header in group.headers:
            if header not in self._open:
                self._open[header] = _OpenPart(self.mapped, header)
            found.append(self._open[header])
        group.opened, group.views = dict.fromkeys(found), [*map(_VIEW, found)]
        group.version = self._version

    def collect_idle(self) -> list[_Key]:
        """Return the slabs without references from the script, in the order in which the pool should reuse them."""
        with self._lock:
            self._ready = None  # it was for a step that failed
            out = [*self._out]
            idle = [*_are_idle(out)]
            busy = {*map(_SLAB, compress(out, map(not_, idle)))}
            found = [*filterfalse(busy.__contains__, dict.fromkeys(map(_SLAB, out)))]
            self._out = {part: None for part in out if part.slab in busy} if busy else {}
            for part in compress(out, map(and_, idle, _have_moved(out))):
                del self._open[part.header]
                self._version += 1
        return found[::-1]

    def forget(self) -> None:
        """Drop all parts: the other end is gone, and memory is freed with its last tensor."""
        with self._lock:
            self._open, self._out, self._ready = {}, {}, None
            self._version += 1
