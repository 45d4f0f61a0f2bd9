"""Slabs: pieces of shared memory in which tensors cross, written once and read in place.

The sender copies a tensor into a slab; the receiver makes a tensor that looks at the slab. No byte is copied twice, and
nobody waits for anybody: a slab is taken from a pool and goes back to it when the receiver's tensor, and all views of
it, are gone. Release notices travel with the next message the other way.

    sender                                      receiver
    pool ──take──► slab ◄── copy tensor
                   (segment 0, offset, size) ──►  tensor looks at the slab  ──► … freed
    pool ◄──────────────── released ───────────────────────────────────────────┘

The memory is anonymous (memfd): it has no name, needs no /dev/shm, and vanishes with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

SEGMENT = 32 << 20  # bytes; larger tensors get a segment of their own
_ALIGN = 64


@dataclass(frozen=True)
class Slab:
    """A piece of a segment."""

    segment: int
    offset: int
    size: int


def rounded(size: int) -> int:
    """The size class of a request: a quarter of a power of two, so that at most a fifth is wasted."""
    if size <= 4 * _ALIGN:
        return max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class Segment:
    """A piece of anonymous memory that other processes can map."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        self.descriptor = os.memfd_create("gemini", os.MFD_CLOEXEC) if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)

    def forget_descriptor(self) -> None:
        """The mapping stays; the descriptor is not needed any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Pool:
    """The sender's side: segments, and the slabs of them that are free. Safe for several threads."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._free: dict[int, list[Slab]] = {}
        self._used = 0  # of the last segment
        self._lock = threading.Lock()
        self.announced = 0  # segments the receiver knows of

    def take(self, size: int) -> Slab:
        """A slab of at least `size` bytes."""
        wanted = rounded(size)
        with self._lock:
            free = self._free.get(wanted)
            if free:
                return free.pop()
            if wanted > SEGMENT // 4:
                return self._own_segment(wanted)
            if not self.segments or self._current().size - self._used < wanted:
                self._grow(SEGMENT)
            slab = Slab(self._shared_at, self._used, wanted)
            self._used += wanted
            return slab

    def _current(self) -> Segment:
        return self.segments[self._shared_at]

    def _grow(self, size: int) -> None:
        self.segments.append(Segment(size))
        self._shared_at, self._used = len(self.segments) - 1, 0

    def _own_segment(self, size: int) -> Slab:
        self.segments.append(Segment(size))
        return Slab(len(self.segments) - 1, 0, size)

    _shared_at = 0

    def release(self, slabs: list[Slab]) -> None:
        """Slabs that the receiver does not use any more."""
        with self._lock:
            for slab in slabs:
                self._free.setdefault(slab.size, []).append(slab)

    def memory(self, slab: Slab) -> memoryview:
        """The bytes of a slab, to write."""
        return memoryview(self.segments[slab.segment].memory)[slab.offset : slab.offset + slab.size]

    def news(self) -> list[Segment]:
        """Segments that the receiver does not know yet."""
        with self._lock:
            return self.segments[self.announced :]

    def announce(self, news: list[Segment]) -> None:
        """The receiver knows these segments now."""
        with self._lock:
            self.announced += len(news)
        for segment in news:
            segment.forget_descriptor()

    @property
    def size(self) -> int:
        """All memory taken from the system."""
        return sum(segment.size for segment in self.segments)


class Window:
    """The receiver's side: the other's segments mapped, and the slabs that have become free again."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._released: deque[Slab] = deque()

    def add(self, size: int, descriptor: int) -> None:
        """Map a new segment of the sender."""
        segment = Segment(size, descriptor)
        segment.forget_descriptor()
        self.segments.append(segment)

    def look(self, slab: Slab, size: int) -> memoryview:
        """The first `size` bytes of a slab; it is released when the last user of this view is gone."""
        view = memoryview(self.segments[slab.segment].memory)[slab.offset : slab.offset + size]
        # A finalizer runs in whatever thread drops the last tensor: it only notes the slab.
        weakref.finalize(view, self._released.append, slab).atexit = False
        return view

    def released(self) -> list[tuple[int, int, int]]:
        """The slabs to give back, each once, as plain data."""
        found = []
        while self._released:
            try:
                slab = self._released.popleft()
            except IndexError:
                break
            found.append((slab.segment, slab.offset, slab.size))
        return found

    def retake(self, slabs: list[tuple[int, int, int]]) -> None:
        """They could not be told."""
        self._released.extend(Slab(*slab) for slab in slabs)
