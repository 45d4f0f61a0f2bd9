"""CPU: anonymous files mapped into each process. Work is synchronous."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable

import torch

from gemini.runtime.devices.base import Device
from gemini.runtime.devices.finalizers import call_when_freed
from gemini.runtime.devices.forked_memory import track_mapping, tracked_mappings
from gemini.runtime.devices.host_memory import format_bytes


class MappedSegment:
    """Anonymous memory (memfd): it has no name, needs no /dev/shm, and is freed with the last process that maps it."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        self.descriptor = os.memfd_create("gemini", os.MFD_CLOEXEC) if descriptor is None else descriptor
        try:
            if descriptor is None:
                os.ftruncate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, size)
        except OSError as error:
            if descriptor is None:
                os.close(self.descriptor)
            limits = "see ulimit -f and -v, and the machine's memory"
            raise OSError(error.errno, f"{error.strerror}: {format_bytes(size)} of shared memory ({limits})") from None
        track_mapping(mapped, self.descriptor)
        self.memory = memoryview(mapped)

    def view(self, offset: int, size: int, freed: Callable[[], None] | None = None) -> torch.Tensor:
        """Return a part of the mapping."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        part = self.memory[offset : offset + size]
        if freed is not None:
            call_when_freed(part, freed)
        return torch.frombuffer(part, dtype=torch.uint8)

    def empty(self, offset: int, size: int) -> None:
        """Return the pages of a part to the system, for all processes that map it; it reads as zeros afterwards."""
        begin, end = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        mapped = self.memory.obj
        if begin < end and isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):  # the memory stays allocated
                mapped.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def shared(self) -> tuple[bytes, tuple[int, ...]]:
        """Return its descriptor."""
        return b"", (self.descriptor,)

    def was_shared(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Cpu(Device):
    """Main memory. There is one CPU device, whatever its index."""

    kind = "cpu"

    @property
    def name(self) -> str:
        """The name without an index."""
        return "cpu"

    @property
    def where(self) -> torch.device:
        """The device without an index."""
        return torch.device("cpu")

    def allocate(self, size: int) -> MappedSegment:
        """Return anonymous memory."""
        return MappedSegment(size)

    def open(self, size: int, shared: bytes, descriptors: tuple[int, ...]) -> MappedSegment:  # noqa: ARG002
        """Map a segment of another process."""
        segment = MappedSegment(size, descriptors[0])
        segment.was_shared()
        return segment

    def rest(self) -> None:
        """Release resident pages; the contents stay in the anonymous file and are paged in on the next access."""
        for mapped in tracked_mappings():
            if hasattr(mmap, "MADV_DONTNEED"):
                with contextlib.suppress(OSError):
                    mapped.madvise(mmap.MADV_DONTNEED)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in main memory."""
        return bool(tensor.device.type == "cpu")
