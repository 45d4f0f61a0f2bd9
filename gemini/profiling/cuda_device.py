"""CUDA GPU as a profiled device.

The host launches kernels, the GPU runs them later; which of the two bounds a step depends on the model. So both are
measured. To measure the GPU's kernels without gaps in which it waits for the host, pauses on the GPU let the host get
ahead, without any other synchronisation:

    host   │ pause │ calls 1…n │ pause │ calls n+1… │
    GPU            │ ·· pause ··│ 1 │ 2 │ … │ n │ ·· pause ··│ n+1 │ …       an event at each │

The host time of the next calls is known from an earlier run of the same calls. The launch queue of a GPU holds about a
thousand launches and blocks the host when full; so only a limited number of calls follows a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gemini.profiling.measured_device import MB, CallTime, Device, MemoryWatch, Result, Stopwatch

_CYCLES_PER_MS = 2_000_000  # of torch.cuda._sleep: at least a millisecond on current GPUs
_LONGEST_PAUSE = 200.0  # ms
_QUEUE = 300  # launches per pause, events included; an op may be two or three kernels
_MARGIN = 1.3  # pause ÷ earlier host time


class CudaDevice(Device):
    """One GPU, measured on its current stream."""

    kind = "cuda"
    is_asynchronous = True

    def __init__(self, torch_device: torch.device) -> None:
        index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)

    def describe(self) -> str:
        """Return the GPU and the settings that select its kernels."""
        name = torch.cuda.get_device_name(self.torch_device)
        tf32 = f"tf32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}"
        return f"{name}, CUDA {torch.version.cuda}, {tf32}"

    def stopwatch(self, earlier: Stopwatch | None = None) -> Stopwatch:
        """Return a stopwatch with events around every call, with pauses if an `earlier` one is given."""
        torch.cuda.synchronize(self.torch_device)
        return CudaStopwatch(self.torch_device, earlier if isinstance(earlier, CudaStopwatch) else None)

    def time_step(self, step: Callable[[], Any]) -> float:
        """Time a whole step from idle GPU to idle GPU."""
        torch.cuda.synchronize(self.torch_device)
        started = time.perf_counter()
        step()
        torch.cuda.synchronize(self.torch_device)
        return (time.perf_counter() - started) * 1e3

    @contextmanager
    def watch(self) -> Iterator[MemoryWatch]:
        """Watch memory by the allocator's statistics, with its peak reset."""
        watch = _AllocatorWatch(self.torch_device)
        watch.restart()
        yield watch

    def release(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Entry:
    key: Hashable
    begin: Any
    end: Any
    started: float  # host clock, s
    host_ms: float
    launches: int


class CudaStopwatch(Stopwatch):
    """Events on the device, a clock on the host."""

    def __init__(self, device: torch.device, earlier: CudaStopwatch | None) -> None:
        self.device, self.earlier = device, earlier
        self.stream = torch.cuda.current_stream(device)
        self.entries: list[_Entry] = []
        self.places: dict[Hashable, int] = {}
        self.left = 0  # launches until the next pause

    def time(self, key: Hashable, call: Callable[[], Result], launches: int = 1) -> Result:
        """Run a call between two events."""
        if self.earlier is not None and self.left <= 0:
            self._pause(self.earlier, key)
        self.left -= launches + 2
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self.stream)
        started = time.perf_counter()
        result = call()
        host_ms = (time.perf_counter() - started) * 1e3
        end.record(self.stream)
        self.places[key] = len(self.entries)
        self.entries.append(_Entry(key, begin, end, started, host_ms, launches))
        return result

    def _pause(self, earlier: CudaStopwatch, key: Hashable) -> None:
        """Pause the device for as long as the host needed for the next calls."""
        first = last = earlier.places.get(key, -1)
        if first < 0:
            return
        self.left = _QUEUE
        total = 0
        while last + 1 < len(earlier.entries) and total < _QUEUE:
            total += earlier.entries[last].launches + 2
            last += 1
        elapsed = (earlier.entries[last].started - earlier.entries[first].started) * 1e3
        pause = min(_LONGEST_PAUSE, _MARGIN * (elapsed + earlier.entries[last].host_ms))
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(pause * _CYCLES_PER_MS))

    def read(self) -> dict[Hashable, CallTime]:
        """Synchronise with the device, then read the events."""
        torch.cuda.synchronize(self.device)
        return {entry.key: CallTime(entry.begin.elapsed_time(entry.end), entry.host_ms) for entry in self.entries}


class _AllocatorWatch:
    """Peak of the caching allocator; the host allocates in order, so no synchronisation is needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self._bytes("current")

    def peak_mb(self) -> float:
        """Return the peak beyond the use at the start of the watch."""
        return float(max(0, self._bytes("peak") - self.before) / MB)

    def _bytes(self, which: str) -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"][which])

    def restart(self) -> None:
        """Reset the peak to the current use."""
        torch.cuda.reset_peak_memory_stats(self.device)
