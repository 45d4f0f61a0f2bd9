"""The device interface: all that profiling asks of a device, and how one is found by name.

A device lends a stopwatch, watches the memory that calls take, and can say who it is. A new kind of accelerator is
one class here and one row in `kinds`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from gemini.errors import ProfileError

MB = 1 << 20
Result = TypeVar("Result")


class Span(NamedTuple):
    """The time of one call (ms): on the device, and of the calling thread where that is another matter, else zero."""

    ms: float
    host_ms: float = 0.0


@dataclass(frozen=True)
class Times:
    """One forward and backward (ms): on the device, and of the calling thread where that is another matter."""

    forward: float
    backward: float
    forward_host: float = 0.0
    backward_host: float = 0.0


class Stopwatch(ABC):
    """Times calls, one after the other, with as little as possible between them."""

    @abstractmethod
    def time(self, key: Hashable, call: Callable[[], Result], launches: int = 1) -> Result:
        """Run a call and time it; on a device with a queue it makes about so many `launches`."""

    @abstractmethod
    def read(self) -> dict[Hashable, Span]:
        """The times of all calls that returned."""


class MemoryWatch(Protocol):
    """Memory taken since the watch began."""

    def peak_mb(self) -> float:
        """The most that was in use at once since the start or the last `restart`."""

    def restart(self) -> None:
        """Look for the peak anew, from what is in use now."""


class Device(ABC):
    """A device that nodes are measured on."""

    kind: str
    torch_device: torch.device
    runs_behind = False  # whether calls return before their work is done

    @abstractmethod
    def describe(self) -> str:
        """Model and settings that times depend on: part of the cache's key."""

    @abstractmethod
    def stopwatch(self, earlier: Stopwatch | None = None) -> Stopwatch:
        """A new stopwatch. A device that runs behind needs an `earlier` one, of the same calls, to know how long the
        calling thread takes; without it only times of the calling thread are right."""

    @abstractmethod
    def watch(self) -> AbstractContextManager[MemoryWatch]:
        """Watch the memory of what runs inside."""

    def time_step(self, step: Callable[[], Any]) -> float:
        """Time a whole step (ms), from an idle device to an idle device."""
        begin = self.now_ms()
        step()
        return self.now_ms() - begin

    def now_ms(self) -> float:
        """A clock of the kind that steps are timed with."""
        return time.perf_counter() * 1e3

    def release(self) -> None:  # noqa: B027 (most devices hold nothing back)
        """Give cached memory back after a node did not fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        phrase in text for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )


def is_elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on another device."""
    at = tensor.device
    return at.type != device.type or (at.index is not None and device.index is not None and at.index != device.index)


def find_device(name: str | torch.device | Device) -> Device:
    """The device of a name such as `cpu`, `cuda` or `cuda:1`; one that is not there lists those that are."""
    if isinstance(name, Device):
        return name
    from gemini.profiling.cpu_device import CpuDevice
    from gemini.profiling.cuda_device import CudaDevice

    kinds: dict[str, Callable[[torch.device], Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}
    present = present_devices()
    try:
        wanted = torch.device(name)
    except (RuntimeError, TypeError):
        wanted = None
    found = str(wanted) if wanted is not None else str(name)
    if wanted is None or wanted.type not in kinds or (wanted.type == "cuda" and not _has_cuda(wanted)):
        raise ProfileError(f"there is no device {found!r}\n    → devices present: {', '.join(present)}")
    return kinds[wanted.type](wanted)


def present_devices() -> list[str]:
    """The names of the devices that can be measured here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(count))]


def _has_cuda(wanted: torch.device) -> bool:
    return bool(torch.cuda.is_available()) and (wanted.index or 0) < torch.cuda.device_count()
