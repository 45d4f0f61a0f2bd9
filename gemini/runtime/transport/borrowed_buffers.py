"""Loans: slabs of the other end that are looked at again and again, such as those of gradients.

A tensor with a storage of its own costs several microseconds to make, and a step has hundreds of them, each time in
the same slabs. So a slab stays open once it was: what is handed out is another tensor on the same storage. Nobody is
told when the last of these is gone; before the next step the storage is asked how many still look at it.

    read ──► slab opened, the first time ──► tensors on its storage ──► program: `p.grad`
    returned ──► storages that only we look at: their slabs go back

A slab that the program still looks at is not given back, so what it holds is never written again.
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

_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors look at a storage
ARE_COUNTED = _count is not None
_DATA = attrgetter("data")  # another tensor on the storage, of which nothing written to others is told
_ADDRESS = methodcaller("data_ptr")
_STORAGE, _HANDLE = attrgetter("storage"), attrgetter("handle")
_LOOKING, _HOLDING = attrgetter("looking"), attrgetter("holding")
_AT = attrgetter("address")
_Key = tuple[int, int, int]


class _Open:
    """A slab that is open, and our own tensors on it, by header."""

    __slots__ = ("address", "handle", "holding", "looking", "looks", "memory", "size", "storage")

    def __init__(self, window: MappedPool, slab: _Key, size: int) -> None:
        self.size = size
        # No `freed`: the storage lives as long as this object, whoever else looks at it.
        self.memory = window.segments[slab[0]].view(slab[1], size)
        self.looks: dict[Header, torch.Tensor] = {}
        # There is one Python object for a storage, which the program may hold without any tensor.
        self.handle = self.memory.untyped_storage()
        self.storage, self.address = self.handle._cdata, self.handle.data_ptr()
        self.looking: int = _count(self.storage)  # our own tensors
        (self.holding,) = _held([self])

    def look(self, header: Header) -> torch.Tensor:
        """Our tensor for a header."""
        if header not in self.looks:
            _, _, _, *part = header
            self.looks[header] = TensorPart(*part).look(self.memory)
            self.looking += 1
        return self.looks[header]


def _held(opened: Iterable[_Open]) -> Iterable[int]:
    """How many hold the Python object of each storage. In one way only: each counts other references of its own."""
    return map(getrefcount, map(_HANDLE, opened))


def _are_idle(opened: list[_Open]) -> Iterable[bool]:
    """Of each, whether nobody but us looks at it. There are dozens in every step: all loops are in C."""
    seen = map(eq, map(_count, map(_STORAGE, opened)), map(_LOOKING, opened))
    return map(and_, seen, map(eq, _held(opened), map(_HOLDING, opened)))


def _have_moved(opened: list[_Open]) -> Iterable[bool]:
    """Of each, whether it is not what it was: `share_memory_` gives a storage other memory. Once nobody but us looks
    at it, nobody does that any more."""
    return map(ne, map(_ADDRESS, map(_HANDLE, opened)), map(_AT, opened))


class BufferGroup:
    """Tensors that come together, again and again: their headers, and what was opened for them the last time."""

    def __init__(self, headers: Iterable[tuple[int, Header]]) -> None:
        self.headers = list(headers)  # by line
        self.opened: dict[_Key, _Open] = {}
        self.looks: list[torch.Tensor] = []
        self.version = -1  # of what was open then


class BorrowedBuffers:
    """Those of one window."""

    def __init__(self, window: MappedPool) -> None:
        self.window = window
        self._open: dict[_Key, _Open] = {}
        self._version = 0  # another one when a slab is opened again
        self._out: dict[_Key, _Open] = {}  # somebody may look at them
        self._lock = threading.Lock()  # or a tensor that is being made would be counted for ours alone
        self._ready: tuple[BufferGroup, list[torch.Tensor]] | None = None  # made before anybody asks

    def foresee(self, row: BufferGroup) -> list[torch.Tensor] | None:
        """The tensors of a row that will be read, if all goes as the last time; None where it cannot."""
        with self._lock:
            if row.version != self._version:
                return None
            self._ready = row, [*map(_DATA, row.looks)]
            return self._ready[1]

    def read(self, row: BufferGroup) -> list[torch.Tensor]:
        """The tensors of a row."""
        with self._lock:
            if row.version != self._version:
                self._ready = None
                with torch.inference_mode(False):
                    self._open_all(row)
            self._out.update(row.opened)
            ready, self._ready = self._ready, None
            return ready[1] if ready is not None and ready[0] is row else [*map(_DATA, row.looks)]

    def _open_all(self, row: BufferGroup) -> None:
        row.opened, row.looks = {}, []
        for _, header in row.headers:
            _, slab, size, *_ = header
            opened = self._open.get(slab)
            if opened is None or opened.size != size:
                if opened is not None:
                    self._version += 1
                opened = self._open[slab] = _Open(self.window, slab, size)
            row.opened[slab] = opened
            row.looks.append(opened.look(header))
        row.version = self._version

    def returned(self) -> list[_Key]:
        """Slabs that nobody looks at any more, in an order in which they would be taken as they were the last time."""
        with self._lock:
            self._ready = None  # for a step that has failed
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
        """There is no other end any more: memory goes with the last tensor that looks at it."""
        with self._lock:
            self._open, self._out, self._ready = {}, {}, None
            self._version += 1
