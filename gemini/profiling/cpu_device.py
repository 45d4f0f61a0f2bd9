"""CPU as a profiled device.

Two clocks: `wall`, the elapsed time, and `cpu`, the processor time of this process divided by its threads, which other
processes hardly disturb; with one thread both agree on an idle machine.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

import torch

from gemini.errors import ProfileError
from gemini.profiling.measured_device import CallTime, Device, MemoryWatch, Result, Stopwatch
from gemini.profiling.node_memory import LiveMemory

CLOCKS = ("wall", "cpu")


class CpuDevice(Device):
    """The processors of this machine, with torch's current number of threads."""

    kind = "cpu"

    def __init__(self, torch_device: torch.device | None = None, clock: str = "wall") -> None:
        if clock not in CLOCKS:
            raise ProfileError(f"unknown clock {clock!r}\n    → choose from {', '.join(CLOCKS)}")
        self.torch_device = torch.device("cpu") if torch_device is None else torch_device
        self.clock = clock

    def describe(self) -> str:
        """Return the processor, the threads and the clock."""
        threads = torch.get_num_threads()
        return f"{_processor()}, {threads} thread{'s' if threads != 1 else ''}, {self.clock} time"

    def now_ms(self) -> float:
        """Return milliseconds of the chosen clock."""
        if self.clock == "wall":
            return time.perf_counter() * 1e3
        threads = int(torch.get_num_threads())
        if threads == 1:  # other threads of the process do not count
            return time.thread_time() * 1e3
        return time.process_time() * 1e3 / threads

    def stopwatch(self, earlier: Stopwatch | None = None) -> Stopwatch:  # noqa: ARG002
        """Return a stopwatch; CPU calls are synchronous, so reading the clock around them suffices."""
        return CpuStopwatch(self.now_ms)

    def watch(self) -> AbstractContextManager[MemoryWatch]:
        """Count storages, since the CPU allocator has no statistics."""
        watch: AbstractContextManager[MemoryWatch] = LiveMemory()
        return watch


class CpuStopwatch(Stopwatch):
    """Reads the clock around every call."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self.now_ms = now_ms
        self.spans: dict[Hashable, CallTime] = {}

    def time(self, key: Hashable, call: Callable[[], Result], launches: int = 1) -> Result:  # noqa: ARG002
        """Run a call and time it."""
        begin = self.now_ms()
        result = call()
        self.spans[key] = CallTime(self.now_ms() - begin)
        return result

    def read(self) -> dict[Hashable, CallTime]:
        """Return the times of all calls."""
        return self.spans


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
