"""CUDA: GPU memory that processes share.

Work on a GPU is queued: a process that sends a tensor may not have computed it yet. Each end therefore synchronizes
before it sends a frame. Events that cross processes would let the queues run on, but processes that share a GPU take
turns on it anyway, and synchronizing leaves no driver state that could outlive a process.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gemini.runtime.devices import cuda_ipc
from gemini.runtime.devices.base import Device
from gemini.runtime.devices.finalizers import call_when_freed


class _Bytes:
    """Bytes at an address, in the form that torch turns into tensors without a copy."""

    def __init__(self, address: int, size: int, owner: CudaSegment) -> None:
        self.owner = owner
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None
        }  # fmt: skip


class CudaSegment:
    """GPU memory, allocated by this process or opened from another. It is freed with its last tensor."""

    def __init__(self, index: int, size: int, handle: bytes = b"") -> None:
        self.index, self.size = index, size
        self.handle = handle
        self.address = cuda_ipc.open_shared(index, handle) if handle else _allocate(index, size)
        leave = cuda_ipc.close_shared if handle else cuda_ipc.free
        weakref.finalize(self, leave, index, self.address).atexit = False

    def view(self, offset: int, size: int, freed: Callable[[], None] | None = None) -> torch.Tensor:
        """Return a part of the segment."""
        device = torch.device("cuda", self.index)
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=device)
        part = _Bytes(self.address + offset, size, self)
        if freed is not None:
            call_when_freed(part, freed)
        return torch.as_tensor(part, device=device)

    def shared(self) -> tuple[bytes, tuple[int, ...]]:
        """Return its IPC handle."""
        return cuda_ipc.share(self.index, self.address), ()

    def was_shared(self) -> None:
        """Do nothing: handles hold no resources."""


def _allocate(index: int, size: int) -> int:
    """Allocate memory; on failure retry after emptying torch's cache."""
    try:
        return cuda_ipc.allocate(index, size)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    try:
        return cuda_ipc.allocate(index, size)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(index)
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size >> 20} MiB on GPU {index} to share with another process; "
            f"{free >> 20} of {total >> 20} MiB are free."
        ) from error


class Cuda(Device):
    """An NVIDIA GPU."""

    kind = "cuda"

    def obstacle(self) -> str:
        """Return why torch cannot use it; '' if it can."""
        if not torch.cuda.is_available():
            return "torch finds no CUDA device on this machine"
        count = torch.cuda.device_count()
        return "" if self.index < count else f"this machine has {count} CUDA devices"

    def allocate(self, size: int) -> CudaSegment:
        """Allocate outside torch's allocator, so that the block can be shared as a whole."""
        return CudaSegment(self.index, size)

    def open(self, size: int, shared: bytes, descriptors: tuple[int, ...]) -> CudaSegment:  # noqa: ARG002
        """Map a segment of another process."""
        return CudaSegment(self.index, size, shared)

    def trim(self) -> None:
        """Return the cache of torch's allocator."""
        gc.collect()
        torch.cuda.empty_cache()

    def prepare(self) -> None:
        """Make it the current device, and initialize autograd's thread for it before anything is timed."""
        torch.cuda.set_device(self.index)
        torch.zeros(1, device=self.where, requires_grad=True).exp().sum().backward()

    def get_generator(self, device: torch.device) -> bytes:
        """Return seed and offset."""
        state: bytes = torch.cuda.get_rng_state(device).numpy().tobytes()
        return state

    def set_generator(self, device: torch.device, state: bytes) -> None:
        """Set seed and offset."""
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)

    def finish(self) -> None:
        """Synchronize all streams of this process."""
        torch.cuda.synchronize(self.index)
