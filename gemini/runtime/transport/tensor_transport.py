"""Tensor transport: tensors of all devices that cross a link, each through shared memory of its own device.

A link carries main memory and the memory of its worker's device. A tensor is written to a slab of the first device
that owns it, and arrives on the same device.

    buffers 0    the worker's device       pool ──► slabs ──► mapped pool
    buffers 1    main memory, if that is another device
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
    """One device: the pool that this end writes to, and the mapped pool of the other end that it reads."""

    device: Device
    pool: SharedMemoryPool
    mapped: MappedPool


class SegmentAnnouncement(NamedTuple):
    """Segments that the other end has not opened yet."""

    plain: list[tuple[int, int, bytes, int]]  # place of the device, size, data to open it, number of descriptors
    descriptors: list[int]
    segments: list[tuple[SharedMemoryPool, list[Segment]]]


class TensorTransport:
    """Both directions of one end."""

    shares_memory = True

    def __init__(self, device: Device | None = None) -> None:
        self.device = device or Cpu()
        devices = [self.device] if self.device.owns(torch.empty(0)) else [self.device, Cpu()]
        self.buffers = [DeviceBuffers(one, SharedMemoryPool(one), MappedPool(one)) for one in devices]
        self._is_plain = type(devices[0]) is Cpu
        self.borrowed = BorrowedBuffers(self.buffers[0].mapped) if self._is_plain and ARE_COUNTED else None

    def write(self, tensor: torch.Tensor) -> tuple[int, Any]:
        """Write a tensor to shared memory; return the device's place and the header, which are plain data."""
        if self._is_plain and tensor.is_cpu:
            return 0, tensor_header.write(self.buffers[0].pool, tensor)
        for at, buffers in enumerate(self.buffers):
            if buffers.device.owns(tensor):
                return at, tensor_header.write(buffers.pool, tensor)
        raise UnsendableTensor(f"a tensor on {tensor.device}")

    def read(self, header: tuple[int, Any]) -> torch.Tensor:
        """Return the tensor of a header."""
        return tensor_header.read(self.buffers[header[0]].mapped, header[1])

    def take_in(self, headers: list[tuple[int, Any] | None]) -> None:
        """Make the contents of a message readable: in shared memory, they are."""

    def borrow(self, group: BufferGroup) -> list[torch.Tensor]:
        """Return the tensors of a group of parts of slabs."""
        if self.borrowed is not None:
            return self.borrowed.read(group)
        opened: dict[Any, torch.Tensor] = {}
        return [tensor_header.read_part(self.buffers[at].mapped, header, opened) for at, header in group.headers]

    def prepare(self, group: BufferGroup) -> list[torch.Tensor] | None:
        """Return the very tensors that the next `borrow` returns, if nothing changes; None if that is not certain."""
        return None if self.borrowed is None else self.borrowed.prepare(group)

    def release_borrowed(self) -> None:
        """Mark idle borrowed slabs for release with the next message."""
        if self.borrowed is not None:
            self.buffers[0].mapped.restore_released(self.borrowed.collect_idle())

    def forget(self) -> None:
        """Drop all memory: the other end is gone."""
        for buffers in self.buffers:
            buffers.pool.forget()
            buffers.mapped.forget()
        if self.borrowed is not None:
            self.borrowed.forget()

    def trim(self) -> None:
        """Return free memory to the system."""
        for buffers in self.buffers:
            buffers.pool.trim()

    # ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def has_updates(self) -> bool:
        """Whether new segments or slabs to release wait for the next message."""
        for buffers in self.buffers:  # noqa: SIM110 - runs for every message: a generator is slower
            if buffers.pool.has_updates or buffers.mapped.has_updates:
                return True
        return False

    def unannounced(self) -> SegmentAnnouncement:
        """Return the segments that must be announced before headers written so far can be read."""
        found = SegmentAnnouncement([], [], [])
        for at, buffers in enumerate(self.buffers):
            segments = buffers.pool.unannounced()
            for segment in segments:
                shared, descriptors = segment.shared()
                found.plain.append((at, segment.size, shared, len(descriptors)))
                found.descriptors.extend(descriptors)
            if segments:
                found.segments.append((buffers.pool, segments))
        return found

    def mark_announced(self, announcement: SegmentAnnouncement) -> None:
        """Note that the other end can open these segments."""
        for pool, segments in announcement.segments:
            pool.mark_announced(segments)

    def open_segments(self, announcement: list[tuple[int, int, bytes, int]], descriptors: list[int]) -> list[int]:
        """Open new segments of the other end; return the descriptors that belong to the message itself."""
        for at, size, shared, count in announcement:
            self.buffers[at].mapped.open_segment(size, shared, tuple(descriptors[:count]))
            descriptors = descriptors[count:]
        return descriptors

    def pop_released(self) -> list[list[tuple[int, int, int]]]:
        """Return the slabs to release, by device, each once."""
        return [buffers.mapped.pop_released() for buffers in self.buffers]

    def release(self, slabs: list[list[tuple[int, int, int]]]) -> None:
        """Take back slabs that the other end has released."""
        for buffers, found in zip(self.buffers, slabs, strict=False):
            if found:
                buffers.pool.release([Slab(*slab) for slab in found])

    def take_back(self, headers: list[tuple[int, Any] | None]) -> None:
        """Free the slabs of headers that were written and will not be sent."""
        for header in headers:
            if header is not None and header[0] >= 0:
                self.buffers[header[0]].pool.release([Slab(*slab) for slab in tensor_header.slabs_of(header[1])])

    def restore_released(self, slabs: list[list[tuple[int, int, int]]]) -> None:
        """Put released slabs back that could not be reported."""
        for buffers, found in zip(self.buffers, slabs, strict=True):
            buffers.mapped.restore_released(found)
