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
from operator import attrgetter, is_
from sys import getrefcount
from typing import Any

import torch

from gemini.runtime.transport.slabs import Window
from gemini.runtime.transport.tensors import Header, Part

_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # how many tensors look at a storage
ARE_COUNTED = _count is not None
_DATA = attrgetter("data")  # another tensor on the storage, of which nothing written to others is told
_Key = tuple[int, int, int]


class _Open:
    """A slab that is open, and our own tensors on it, by header."""

    __slots__ = ("_address", "_handle", "_own", "_refs", "_storage", "looks", "memory", "size")

    def __init__(self, window: Window, slab: _Key, size: int) -> None:
        self.size = size
        # No `freed`: the storage lives as long as this object, whoever else looks at it.
        self.memory = window.segments[slab[0]].view(slab[1], size)
        self._address = self.memory.data_ptr()
        self.looks: dict[Header, torch.Tensor] = {}
        # There is one Python object for a storage, which the program may hold without any tensor.
        self._handle = self.memory.untyped_storage()
        self._storage = self._handle._cdata
        self._own, self._refs = _count(self._storage), getrefcount(self._handle)

    def is_whole(self) -> bool:
        """Whether it is still what it was: `share_memory_` gives a storage other memory."""
        return bool(self.memory.data_ptr() == self._address)

    def is_idle(self) -> bool:
        """Whether nobody but us looks at it."""
        looking: int = _count(self._storage)
        return looking == self._own + len(self.looks) and getrefcount(self._handle) == self._refs


class Row:
    """Tensors that come together, again and again: their headers, and what was opened for them the last time."""

    def __init__(self, headers: Iterable[tuple[int, Header]]) -> None:
        self.headers = list(headers)  # by line
        self.opened: dict[_Key, _Open] = {}
        self.looks: list[torch.Tensor] = []


class Loans:
    """Those of one window."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self._open: dict[_Key, _Open] = {}
        self._out: dict[_Key, _Open] = {}  # somebody may look at them
        self._lock = threading.Lock()  # or a tensor that is being made would be counted for ours alone

    def read(self, row: Row) -> list[torch.Tensor]:
        """The tensors of a row."""
        with self._lock:
            if not row.looks or not self._is_open(row):
                with torch.inference_mode(False):
                    self._open_all(row)
            self._out.update(row.opened)
            return [*map(_DATA, row.looks)]

    def _is_open(self, row: Row) -> bool:
        """Whether its slabs are what they were."""
        opened = row.opened.values()
        return all(map(is_, map(self._open.get, row.opened), opened)) and all(map(_Open.is_whole, opened))

    def _open_all(self, row: Row) -> None:
        row.opened, row.looks = {}, []
        for _, header in row.headers:
            _, slab, size, *part = header
            opened = self._open.get(slab)
            if opened is None or opened.size != size or not opened.is_whole():
                opened = self._open[slab] = _Open(self.window, slab, size)
            if header not in opened.looks:
                opened.looks[header] = Part(*part).look(opened.memory)
            row.opened[slab] = opened
            row.looks.append(opened.looks[header])

    def returned(self) -> list[_Key]:
        """Slabs that nobody looks at any more, in an order in which they would be taken as they were the last time."""
        with self._lock:
            found = [slab for slab, opened in self._out.items() if opened.is_idle()]
            for slab in found:
                del self._out[slab]
        return found[::-1]

    def forget(self) -> None:
        """There is no other end any more: memory goes with the last tensor that looks at it."""
        with self._lock:
            self._open, self._out = {}, {}
