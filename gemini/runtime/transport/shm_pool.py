"""Slabs: pieces of shared memory in which tensors cross, written once and read in place.

The sender copies a tensor into a slab; the receiver makes a tensor that looks at the slab. No byte is copied twice, and
nobody waits for anybody: a slab is taken from a pool and goes back to it when the receiver's tensor, and all views of
it, are gone. Release notices travel with the next message the other way.

    sender                                      receiver
    pool ──take──► slab ◄── copy tensor
                   (segment 0, offset, size) ──►  tensor looks at the slab  ──► … freed
    pool ◄──────────────── released ───────────────────────────────────────────┘

The memory is that of a device: on a CPU anonymous files, on a GPU memory that both processes have mapped.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

from gemini.runtime.devices.base import Device, Segment

SEGMENT = 32 << 20  # bytes; larger tensors get a segment of their own
ALIGN = 64


class Slab(NamedTuple):
    """A piece of a segment."""

    segment: int
    offset: int
    size: int


def round_size(size: int) -> int:
    """The size class of a request: a quarter of a power of two, so that at most a fifth is wasted."""
    if size <= 4 * ALIGN:
        return max(ALIGN, -(-size // ALIGN) * ALIGN)
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class SharedMemoryPool:
    """The sender's side: segments, and the slabs of them that are free. Safe for several threads."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.segments: list[Segment] = []
        self._free: dict[int, list[Slab]] = {}
        self._shared: int | None = None  # the segment that small slabs are cut from; others belong to one slab each
        self._used = 0  # of it
        self._lock = threading.Lock()
        self.announced = 0  # segments the receiver knows of

    def take(self, size: int) -> Slab:
        """A slab of at least `size` bytes."""
        wanted = round_size(size)
        with self._lock:
            free = self._free.get(wanted)
            if free:
                return free.pop()
            if wanted > SEGMENT // 4:
                return self._own_segment(wanted)
            if self._shared is None or self.segments[self._shared].size - self._used < wanted:
                self._shared, self._used = self._own_segment(SEGMENT).segment, 0
            slab = Slab(self._shared, self._used, wanted)
            self._used += wanted
            return slab

    def _own_segment(self, size: int) -> Slab:
        """All of a new segment."""
        self.segments.append(self.device.allocate(size))
        return Slab(len(self.segments) - 1, 0, size)

    def release(self, slabs: list[Slab]) -> None:
        """Slabs that the receiver does not use any more."""
        with self._lock:
            for slab in slabs:
                self._free.setdefault(slab.size, []).append(slab)

    def forget(self) -> None:
        """There is no receiver any more: memory goes with the last tensor that looks at it."""
        with self._lock:
            self.segments, self._free = [], {}
            self._shared, self._used, self.announced = None, 0, 0

    def trim(self) -> None:
        """Return the memory of slabs that are free to the system, where the device can; they can still be taken."""
        with self._lock:
            for slabs in self._free.values():
                for slab in slabs:
                    empty = getattr(self.segments[slab.segment], "empty", None)
                    if empty is not None:
                        empty(slab.offset, slab.size)

    def view(self, slab: Slab, size: int) -> torch.Tensor:
        """The first `size` bytes of a slab, to write."""
        return self.segments[slab.segment].view(slab.offset, size)

    @property
    def has_updates(self) -> bool:
        """Whether there are such segments as `news` names."""
        return len(self.segments) != self.announced

    def news(self) -> list[Segment]:
        """Segments that the receiver does not know yet."""
        with self._lock:
            return self.segments[self.announced :]

    def announce(self, news: list[Segment]) -> None:
        """The receiver knows these segments now."""
        with self._lock:
            self.announced += len(news)
        for segment in news:
            segment.was_shared()

    @property
    def size(self) -> int:
        """All memory taken from the system."""
        return sum(segment.size for segment in self.segments)


class MappedPool:
    """The receiver's side: the other's segments mapped, and the slabs that have become free again."""

    def __init__(self, device: Device) -> None:
        self.device, self.where = device, device.where
        self.is_main = self.where.type == "cpu"  # memory
        self.segments: list[Segment] = []
        self._released: deque[tuple[int, int, int]] = deque()

    def add(self, size: int, shared: bytes, descriptors: tuple[int, ...]) -> None:
        """Open a new segment of the sender."""
        self.segments.append(self.device.open(size, shared, descriptors))

    def look(self, slab: Slab, size: int) -> torch.Tensor:
        """The first `size` bytes of a slab; it is released when the last tensor that looks at them is gone."""
        # What is called then runs in whatever thread drops that tensor: it only notes the slab.
        segment, offset, length = slab
        note = functools.partial(self._released.append, (segment, offset, length))
        return self.segments[segment].view(offset, size, note)

    def forget(self) -> None:
        """There is no sender any more: memory goes with the last tensor that looks at it."""
        self.segments = []

    @property
    def has_updates(self) -> bool:
        """Whether there are slabs to give back."""
        return bool(self._released)

    def released(self) -> list[tuple[int, int, int]]:
        """The slabs to give back, each once, as plain data."""
        # One thread at a time asks; others may note slabs meanwhile.
        return [self._released.popleft() for _ in range(len(self._released))]

    def retake(self, slabs: Iterable[tuple[int, int, int]]) -> None:
        """They could not be told, or were noted elsewhere."""
        self._released.extend(slabs)
