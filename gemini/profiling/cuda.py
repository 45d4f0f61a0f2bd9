"""A CUDA GPU as a measured device.

The host starts kernels, the GPU runs them later; which of the two limits a step depends on the model. So both are
read. To see the GPU's own time and not the gaps in which it waits for the host, it is first given a pause long
enough for the host to get ahead:

    host   │ pause │ forward kernels │ backward kernels │
    GPU            │ ····· pause ····│event│ forward │event│ backward │event│
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gemini.profiling.device import MB, Backward, Device, MemoryWatch, Times

_CYCLES_A_MS = 2_000_000  # of torch.cuda._sleep: at least a millisecond on every GPU in use
_LONGEST_PAUSE = 100.0  # ms
_FIRST_PAUSE = 1.0


class CudaDevice(Device):
    """One GPU; readings on its current stream."""

    kind = "cuda"

    def __init__(self, torch_device: torch.device) -> None:
        index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)

    def describe(self) -> str:
        """The GPU and the settings that choose its kernels."""
        name = torch.cuda.get_device_name(self.torch_device)
        tf32 = f"tf32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}"
        return f"{name}, CUDA {torch.version.cuda}, {tf32}"

    def time(self, forward: Callable[[], Any], prepare: Callable[[Any], Backward | None], hint: float = 0.0) -> Times:
        """Events around forward and backward, behind a pause twice as long as the host is said to need."""
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE + 2 * hint)
        with torch.cuda.device(self.torch_device):
            begin, forward_end, backward_begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(pause * _CYCLES_A_MS))
            begin.record()
            started = time.perf_counter()
            result = forward()
            forward_host = (time.perf_counter() - started) * 1e3
            forward_end.record()
            backward = prepare(result)
            del result
            backward_begin.record()
            backward_host = 0.0
            if backward is not None:
                started = time.perf_counter()
                gradients = backward()
                backward_host = (time.perf_counter() - started) * 1e3
                end.record()
                del gradients
            else:
                end.record()
            torch.cuda.synchronize()
            times = begin.elapsed_time(forward_end), backward_begin.elapsed_time(end)
            return Times(times[0], times[1] if backward is not None else 0.0, forward_host, backward_host)

    def time_step(self, step: Callable[[], Any]) -> float:
        """A whole step from an idle GPU to an idle GPU."""
        torch.cuda.synchronize(self.torch_device)
        started = time.perf_counter()
        step()
        torch.cuda.synchronize(self.torch_device)
        return (time.perf_counter() - started) * 1e3

    @contextmanager
    def watch(self) -> Iterator[MemoryWatch]:
        """The allocator's own statistics; its record of the peak starts anew."""
        torch.cuda.synchronize(self.torch_device)
        watch = _AllocatorWatch(self.torch_device)
        watch.restart()
        yield watch

    def release(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.empty_cache()


class _AllocatorWatch:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = torch.cuda.memory_allocated(device)

    def peak_mb(self) -> float:
        """The most beyond what was in use when the watch began."""
        return float(max(0, torch.cuda.max_memory_allocated(self.device) - self.before) / MB)

    def restart(self) -> None:
        """Look for the peak anew."""
        torch.cuda.reset_peak_memory_stats(self.device)
