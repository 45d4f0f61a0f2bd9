"""Device interface of profiling, and lookup of devices by name.

A device provides a stopwatch, a memory watch and a description. A new kind of accelerator is one subclass and one entry
in `kinds`.
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


class CallTime(NamedTuple):
    """The time of one call (ms): on the device, and of the calling thread on an asynchronous device, else zero."""

    ms: float
    host_ms: float = 0.0


@dataclass(frozen=True)
class NodeTimes:
    """One forward and backward (ms): on the device, and of the calling thread on an asynchronous device."""

    forward: float
    backward: float
    forward_host: float = 0.0
    backward_host: float = 0.0


class Stopwatch(ABC):
    """Times consecutive calls with little overhead between them."""

    @abstractmethod
    def time(self, key: Hashable, call: Callable[[], Result], launches: int = 1) -> Result:
        """Run a call and time it; `launches` is its approximate number of kernels on a device with a queue."""

    @abstractmethod
    def read(self) -> dict[Hashable, CallTime]:
        """Return the times of all calls that returned."""


class MemoryWatch(Protocol):
    """Memory allocated since the watch began."""

    def peak_mb(self) -> float:
        """Return the peak since the start or the last `restart`."""

    def restart(self) -> None:
        """Reset the peak to the current use."""


class Device(ABC):
    """A device on which nodes are measured."""

    kind: str
    torch_device: torch.device
    is_asynchronous = False  # whether calls return before their work is done

    @abstractmethod
    def describe(self) -> str:
        """Return the model and the settings that times depend on; part of the cache key."""

    @abstractmethod
    def stopwatch(self, earlier: Stopwatch | None = None) -> Stopwatch:
        """Return a new stopwatch. An asynchronous device needs an `earlier` one of the same calls for their host times;
        without it only host times are accurate."""

    @abstractmethod
    def watch(self) -> AbstractContextManager[MemoryWatch]:
        """Watch the memory of calls inside the context."""

    def time_step(self, step: Callable[[], Any]) -> float:
        """Time a whole step (ms), from an idle device to an idle device."""
        begin = self.now_ms()
        step()
        return self.now_ms() - begin

    def now_ms(self) -> float:
        """Return milliseconds of the clock that times steps."""
        return time.perf_counter() * 1e3

    def release(self) -> None:  # noqa: B027 (optional)
        """Free cached memory after a node did not fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory is exhausted."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        phrase in text for phrase in ("out of memory", "can't allocate memory", "not enough memory")
    )


def is_on_other_device(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on another device."""
    at = tensor.device
    return at.type != device.type or (at.index is not None and device.index is not None and at.index != device.index)


def find_device(name: str | torch.device | Device) -> Device:
    """Return the device of a name such as `cpu`, `cuda` or `cuda:1`; raises ProfileError listing those present."""
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
    """Return the names of the devices present."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(count))]


def _has_cuda(wanted: torch.device) -> bool:
    return bool(torch.cuda.is_available()) and (wanted.index or 0) < torch.cuda.device_count()
