"""The carriage: tensors of all devices that cross a link, each through the memory of its own device.

A link carries main memory, and the memory of the device that its worker computes on. A tensor goes through slabs of the
first of its lines that owns it, and arrives on the same device.

    line 0    the worker's device       pool ──► slabs ──► window
    line 1    main memory, if that is another one
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.transport import tensor_header
from gemini.runtime.transport.borrowed_buffers import ARE_COUNTED, BorrowedBuffers, BufferGroup
from gemini.runtime.transport.shm_pool import MappedPool, SharedMemoryPool, Slab
from gemini.runtime.transport.tensor_header import UnsendableTensor


class DeviceBuffers(NamedTuple):
    """One device: where we write, and what we read of the other end."""

    device: Device
    pool: SharedMemoryPool
    window: MappedPool


class SegmentAnnouncement(NamedTuple):
    """Segments that the other end does not know yet."""

    plain: list[tuple[int, int, bytes, int]]  # line, size, what is needed to open it, number of descriptors
    descriptors: list[int]
    segments: list[tuple[SharedMemoryPool, list[Segment]]]


class TensorTransport:
    """Both directions of one end."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device or Cpu()
        devices = [self.device] if self.device.owns(torch.empty(0)) else [self.device, Cpu()]
        self.lines = [DeviceBuffers(one, SharedMemoryPool(one), MappedPool(one)) for one in devices]
        self._is_plain = type(devices[0]) is Cpu
        self.borrowed = BorrowedBuffers(self.lines[0].window) if self._is_plain and ARE_COUNTED else None

    def write(self, tensor: torch.Tensor) -> tuple[int, Any]:
        """Put a tensor on its way: its line and its header, which are plain data."""
        if self._is_plain and tensor.is_cpu:
            return 0, tensor_header.write(self.lines[0].pool, tensor)
        for at, line in enumerate(self.lines):
            if line.device.owns(tensor):
                return at, tensor_header.write(line.pool, tensor)
        raise UnsendableTensor(f"a tensor on {tensor.device}")

    def read(self, header: tuple[int, Any]) -> torch.Tensor:
        """The tensor of a header."""
        return tensor_header.read(self.lines[header[0]].window, header[1])

    def borrow(self, row: BufferGroup) -> list[torch.Tensor]:
        """The tensors of a row of parts of slabs."""
        if self.borrowed is not None:
            return self.borrowed.read(row)
        opened: dict[Any, torch.Tensor] = {}
        return [tensor_header.read_part(self.lines[at].window, header, opened) for at, header in row.headers]

    def foresee(self, row: BufferGroup) -> list[torch.Tensor] | None:
        """The very tensors that `borrow` will give, if all goes as the last time; None where nobody can tell."""
        return None if self.borrowed is None else self.borrowed.foresee(row)

    def look_around(self) -> None:
        """Note what was borrowed and is not looked at any more: it is told with the next message."""
        if self.borrowed is not None:
            self.lines[0].window.retake(self.borrowed.returned())

    def forget(self) -> None:
        """There is no other end any more."""
        for line in self.lines:
            line.pool.forget()
            line.window.forget()
        if self.borrowed is not None:
            self.borrowed.forget()

    def trim(self) -> None:
        """Return memory that nothing is in to the system."""
        for line in self.lines:
            line.pool.trim()

    # ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def has_updates(self) -> bool:
        """Whether there is anything to tell: new segments, or slabs to give back."""
        for line in self.lines:  # noqa: SIM110 - asked for every message: a generator takes longer
            if line.pool.has_updates or line.window.has_updates:
                return True
        return False

    def news(self) -> SegmentAnnouncement:
        """What must be told before headers written so far can be read."""
        found = SegmentAnnouncement([], [], [])
        for at, line in enumerate(self.lines):
            segments = line.pool.news()
            for segment in segments:
                shared, descriptors = segment.shared()
                found.plain.append((at, segment.size, shared, len(descriptors)))
                found.descriptors.extend(descriptors)
            if segments:
                found.segments.append((line.pool, segments))
        return found

    def announce(self, news: SegmentAnnouncement) -> None:
        """The other end knows these now."""
        for pool, segments in news.segments:
            pool.announce(segments)

    def take(self, news: list[tuple[int, int, bytes, int]], descriptors: list[int]) -> list[int]:
        """Open the other end's new segments; returns the descriptors that are not theirs."""
        for at, size, shared, count in news:
            self.lines[at].window.add(size, shared, tuple(descriptors[:count]))
            descriptors = descriptors[count:]
        return descriptors

    def released(self) -> list[list[tuple[int, int, int]]]:
        """Slabs to give back, by line."""
        return [line.window.released() for line in self.lines]

    def release(self, slabs: list[list[tuple[int, int, int]]]) -> None:
        """Slabs that the other end has given back."""
        for line, found in zip(self.lines, slabs, strict=False):
            if found:
                line.pool.release([Slab(*slab) for slab in found])

    def take_back(self, headers: list[tuple[int, Any] | None]) -> None:
        """Headers that were written and will not be sent: their slabs are free again."""
        for header in headers:
            if header is not None and header[0] >= 0:
                self.lines[header[0]].pool.release([Slab(*slab) for slab in tensor_header.slabs_of(header[1])])

    def retake(self, slabs: list[list[tuple[int, int, int]]]) -> None:
        """Released slabs that could not be told."""
        for line, found in zip(self.lines, slabs, strict=True):
            line.window.retake(found)
