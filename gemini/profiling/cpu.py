"""The CPU as a measured device.

Within a step the gradients of parameters stay, so each is written to fresh memory, at a page fault every 4 KB: a tenth
of the step and more where parameters are many and samples few. A node measured alone would get back the memory it has
just freed. So free memory is returned to the system before the backward of a node whose parameters outweigh its
values.

Two clocks: `wall`, what a stop watch shows, and `cpu`, the processor time of this process divided by its threads,
which other processes on the machine hardly disturb; with one thread both agree on an idle machine.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gemini.errors import ProfileError
from gemini.profiling.device import Backward, Device, MemoryWatch, Times
from gemini.profiling.live_memory import LiveMemory

CLOCKS = ("wall", "cpu")


class CpuDevice(Device):
    """The processors of this machine, with torch's current number of threads."""

    kind = "cpu"

    def __init__(self, torch_device: torch.device | None = None, clock: str = "wall") -> None:
        if clock not in CLOCKS:
            raise ProfileError(f"no clock {clock!r}\n    → choose from {', '.join(CLOCKS)}")
        self.torch_device = torch.device("cpu") if torch_device is None else torch_device
        self.clock = clock

    def describe(self) -> str:
        """The processor, the threads and the clock."""
        threads = torch.get_num_threads()
        return f"{_processor()}, {threads} thread{'s' if threads != 1 else ''}, {self.clock} time"

    def now_ms(self) -> float:
        """Milliseconds of the chosen clock."""
        if self.clock == "wall":
            return time.perf_counter() * 1e3
        return time.process_time() * 1e3 / int(torch.get_num_threads())

    def time(self, forward: Callable[[], Any], prepare: Callable[[Any], Backward | None], hint: float = 0.0) -> Times:  # noqa: ARG002
        """Calls run to their end on the CPU, so a clock around them is all it takes."""
        begin = self.now_ms()
        result = forward()
        forward_ms = self.now_ms() - begin
        backward = prepare(result)
        del result
        if backward is None:
            return Times(forward_ms, 0.0)
        begin = self.now_ms()
        gradients = backward()
        backward_ms = self.now_ms() - begin
        del gradients
        return Times(forward_ms, backward_ms)

    def refresh(self) -> None:
        """Return free memory to the system."""
        trim = _malloc_trim()
        if trim is not None:
            trim(0)

    def watch(self) -> AbstractContextManager[MemoryWatch]:
        """Count storages, as the CPU's allocator keeps no statistics."""
        watch: AbstractContextManager[MemoryWatch] = LiveMemory()
        return watch


@lru_cache(maxsize=1)
def _malloc_trim() -> Callable[[int], int] | None:
    """The function of the C library that does it, if it has one (glibc)."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
