"""Device: memory that processes share, random number generators, and completion of queued work.

A back end subclasses `Device` and is named in the registry. An instance is one device as one end of a link sees it:
the controller has one per worker, each worker has one.

    controller                                      worker
    allocate(size) ─► segment ── shared() ────────► open(…)         both map the same memory
    finish()  ─► frame ───────────────────────────► reads it        the contents are complete when the frame arrives

A device without a queue (a CPU) executes synchronously and has nothing to finish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Segment(Protocol):
    """A piece of device memory that other processes can open."""

    size: int

    def view(self, offset: int, size: int, freed: Callable[[], None] | None = None) -> torch.Tensor:
        """Return a part as a `uint8` tensor with its own storage; `freed` is called when that storage is freed."""
        ...

    def shared(self) -> tuple[bytes, tuple[int, ...]]:
        """Return what another process needs to open the segment: bytes, and file descriptors to pass."""
        ...

    def was_shared(self) -> None:
        """Note that `shared` has been sent; the receivers may not have opened the segment yet."""
        ...


class Device:
    """One device. Only `allocate` and `open` have no default; the defaults fit plain memory."""

    kind = ""  # the part of the name before the colon

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @property
    def name(self) -> str:
        """The name in a device mapping."""
        return f"{self.kind}:{self.index}"

    @property
    def where(self) -> torch.device:
        """The `torch.device` of its tensors."""
        return torch.device(self.kind, self.index)

    def obstacle(self) -> str:
        """Return why it cannot be used on this machine; '' if it can."""
        return ""

    # ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────
    def allocate(self, size: int) -> Segment:
        """Return a new segment."""
        raise NotImplementedError

    def open(self, size: int, shared: bytes, descriptors: tuple[int, ...]) -> Segment:
        """Open a segment of another process."""
        raise NotImplementedError

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether the contents of a tensor lie on this device."""
        return bool(tensor.device == self.where)

    def rest(self) -> None:
        """Release pages of shared memory that this process has touched and other processes also map."""

    def trim(self) -> None:
        """Return idle memory of this process to the device."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception reports that the device is out of memory."""
        return isinstance(error, torch.OutOfMemoryError)

    # ── worker process ─────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self) -> None:
        """Prepare a worker process to compute on the device."""

    # ── random numbers ─────────────────────────────────────────────────────────────────────────────────────────
    def get_generator(self, device: torch.device) -> bytes:  # noqa: ARG002
        """Return the state of the generator of a device of this kind, in addition to the CPU's."""
        return b""

    def set_generator(self, device: torch.device, state: bytes) -> None:
        """Set that state."""

    # ── queued work ────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Wait until all work queued by this process is complete. Called before every frame is sent."""
