"""The interface of a device: memory that processes share, generators, and the end of queued work.

A back end is a class with this interface, named in the registry. An object of it is one device as one end of a link
sees it: the controller has one for each worker, a worker has one.

    controller                                      worker
    allocate(size) ─► segment ── shared() ────────► open(…)         both see the same memory
    finish()  ─► frame ───────────────────────────► reads it        what a frame names is there when it arrives

A device without queues of its own (a CPU) does its work at once, and has nothing to finish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Segment(Protocol):
    """A piece of the device's memory that other processes can open."""

    size: int

    def view(self, offset: int, size: int, freed: Callable[[], None] | None = None) -> torch.Tensor:
        """Bytes of it, as a `uint8` tensor with a storage of its own; `freed` is called when that storage is gone."""
        ...

    def shared(self) -> tuple[bytes, tuple[int, ...]]:
        """What another process needs to open it: bytes, and descriptors that are passed to it."""
        ...

    def was_shared(self) -> None:
        """What others need has been sent to them; they may not have opened it yet."""
        ...


class Device:
    """One device. Only `allocate` and `open` have no default: the defaults are those of plain memory."""

    kind = ""  # the part of its name before the colon

    def __init__(self, index: int = 0) -> None:
        self.index = index

    @property
    def name(self) -> str:
        """As in a device mapping."""
        return f"{self.kind}:{self.index}"

    @property
    def where(self) -> torch.device:
        """The device of tensors that live there."""
        return torch.device(self.kind, self.index)

    def obstacle(self) -> str:
        """Why it cannot be used on this machine; '' if it can."""
        return ""

    # ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────
    def allocate(self, size: int) -> Segment:
        """A new segment."""
        raise NotImplementedError

    def open(self, size: int, shared: bytes, descriptors: tuple[int, ...]) -> Segment:
        """A segment of another process."""
        raise NotImplementedError

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the contents of a tensor lie on this device."""
        return bool(tensor.device == self.where)

    def rest(self) -> None:
        """Let go of shared memory that this process has looked at and others hold as well."""

    def trim(self) -> None:
        """Give memory that lies idle in this process back to the device."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception says that the device has no memory left."""
        return isinstance(error, torch.OutOfMemoryError)

    # ── the worker's process ───────────────────────────────────────────────────────────────────────────────────
    def prepare(self) -> None:
        """Make a worker's process ready to compute there."""

    # ── random numbers ─────────────────────────────────────────────────────────────────────────────────────────
    def get_generator(self, device: torch.device) -> bytes:  # noqa: ARG002
        """The state of a device's generator beside the CPU's, of any device of this kind."""
        return b""

    def set_generator(self, device: torch.device, state: bytes) -> None:
        """Put it in a state."""

    # ── the order of work ──────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """Wait until everything that this process has queued there is done. Called before every frame is sent."""
