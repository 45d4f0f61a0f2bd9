"""Shared memory pool: slabs in which tensors cross, written once and read in place.

The sender copies a tensor into a slab; the receiver creates a tensor on the slab. Bytes are copied once and neither
side blocks: a slab is taken from the pool and returns to it when the receiver's tensor and all its views are freed.
Releases travel with the next message in the other direction.

    sender                                      receiver
    pool ──take──► slab ◄── copy tensor
                   (segment 0, offset, size) ──►  tensor on the slab  ──► … freed
    pool ◄──────────────── released ─────────────────────────────────────┘

The memory is that of a device: anonymous files on a CPU, memory mapped by both processes on a GPU.
"""

from __future__ import annotations

import functools
import os
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
    """Return the size class of a request, a multiple of a quarter of a power of two: at most a fifth is wasted."""
    if size <= 4 * ALIGN:
        return max(ALIGN, -(-size // ALIGN) * ALIGN)
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


class SharedMemoryPool:
    """The sender's side: segments and their free slabs. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.segments: list[Segment] = []
        self._free: dict[int, list[Slab]] = {}
        self._shared: int | None = None  # the segment that small slabs are cut from; the rest hold one slab each
        self._used = 0  # bytes of that segment
        self._lock = threading.Lock()
        self.announced = 0  # segments that the receiver can open
        self._kept: dict[int, int] = {}  # descriptors of segments that several processes write to
        self._group_free: dict[int, list[Slab]] = {}

    def take(self, size: int) -> Slab:
        """Return a slab of at least `size` bytes."""
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

    def take_for_group(self, size: int) -> Slab:
        """Return a slab in a segment of its own, which other processes can open, too (`descriptor_of`)."""
        wanted = round_size(size)
        with self._lock:
            free = self._group_free.get(wanted)
            if free:
                return free.pop()
            slab = self._own_segment(wanted)
            self._kept[slab.segment] = os.dup(self.segments[slab.segment].shared()[1][0])
            return slab

    def descriptor_of(self, slab: Slab) -> int:
        """Return the descriptor of a slab of `take_for_group`, to be sent to another process."""
        return self._kept[slab.segment]

    def _own_segment(self, size: int) -> Slab:
        """Return the whole of a new segment as a slab."""
        self.segments.append(self.device.allocate(size))
        return Slab(len(self.segments) - 1, 0, size)

    def release(self, slabs: list[Slab]) -> None:
        """Take back slabs that the receiver has released."""
        with self._lock:
            for slab in slabs:
                free = self._group_free if slab.segment in self._kept else self._free
                free.setdefault(slab.size, []).append(slab)

    def forget(self) -> None:
        """Drop all segments: the receiver is gone, and memory is freed with its last tensor."""
        with self._lock:
            self.segments, self._free, self._group_free = [], {}, {}
            for descriptor in self._kept.values():
                os.close(descriptor)
            self._kept = {}
            self._shared, self._used, self.announced = None, 0, 0

    def trim(self) -> None:
        """Return the memory of free slabs to the system where the device can; they stay usable."""
        with self._lock:
            for slabs in (*self._free.values(), *self._group_free.values()):
                for slab in slabs:
                    empty = getattr(self.segments[slab.segment], "empty", None)
                    if empty is not None:
                        empty(slab.offset, slab.size)

    def view(self, slab: Slab, size: int) -> torch.Tensor:
        """Return the first `size` bytes of a slab, to write."""
        return self.segments[slab.segment].view(slab.offset, size)

    @property
    def has_updates(self) -> bool:
        """Whether segments have not been announced yet."""
        return len(self.segments) != self.announced

    def unannounced(self) -> list[Segment]:
        """Return the segments that the receiver has not opened yet."""
        with self._lock:
            return self.segments[self.announced :]

    def mark_announced(self, segments: list[Segment]) -> None:
        """Note that the receiver can open these segments."""
        with self._lock:
            self.announced += len(segments)
        for segment in segments:
            segment.was_shared()

    @property
    def size(self) -> int:
        """All memory taken from the system, in bytes."""
        return sum(segment.size for segment in self.segments)


class MappedPool:
    """The receiver's side: the sender's segments, mapped, and the slabs to release."""

    def __init__(self, device: Device) -> None:
        self.device, self.where = device, device.where
        self.is_main = self.where.type == "cpu"  # memory
        self.segments: list[Segment] = []
        self._released: deque[tuple[int, int, int]] = deque()

    def open_segment(self, size: int, shared: bytes, descriptors: tuple[int, ...]) -> None:
        """Open a new segment of the sender."""
        self.segments.append(self.device.open(size, shared, descriptors))

    def view(self, slab: Slab, size: int) -> torch.Tensor:
        """Return the first `size` bytes of a slab; it is released when the last tensor on them is freed."""
        # The callback runs in the thread that frees the tensor: it only records the slab.
        segment, offset, length = slab
        note = functools.partial(self._released.append, (segment, offset, length))
        return self.segments[segment].view(offset, size, note)

    def forget(self) -> None:
        """Drop all segments: the sender is gone, and memory is freed with its last tensor."""
        self.segments = []

    @property
    def has_updates(self) -> bool:
        """Whether slabs wait to be released."""
        return bool(self._released)

    @property
    def pending_releases(self) -> int:
        """The number of slabs that wait to be released."""
        return len(self._released)

    def pop_released(self) -> list[tuple[int, int, int]]:
        """Return the slabs to release, each once, as plain data."""
        # One thread at a time calls this; other threads may record slabs meanwhile.
        return [self._released.popleft() for _ in range(len(self._released))]

    def restore_released(self, slabs: Iterable[tuple[int, int, int]]) -> None:
        """Mark slabs for release: they could not be reported before, or were found idle by another component."""
        self._released.extend(slabs)
