"""Host speed: matrix products and bytes copied per millisecond by this process.

Two kernels alternate several times: products of matrices that fit the caches, which load a core like layers of a model,
and copies larger than the caches. Processes that measure at the same time slow each other down: the slowdown relative
to a single process is their contention.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ROWS = 192  # of square matrices; three of them fit the L2 cache of a core
_COPIED = 16 << 20  # bytes per buffer; two exceed the caches of a core, and are small for a worker
_MB = float(1 << 20)
_COMPUTING, _COPYING, _PAUSE = 0.02, 0.04, 0.03  # seconds per reading, and between rounds
_ROUNDS = 3


class HostSpeed(NamedTuple):
    """Rates of one process per millisecond: matrix products, and MB read and written by copies."""

    products: float
    moved_mb: float


def measure_speed(rounds: int = _ROUNDS) -> HostSpeed:
    """Measure the speed of this process on its threads; takes about 0.3 s."""
    one, other = (torch.full((_ROWS, _ROWS), 0.01, dtype=torch.float32) for _ in range(2))
    made = torch.empty_like(one)
    # Mapped memory returns to the system at once; heap memory would stay in the process.
    source, target = (_allocate_pages(mmap.mmap(-1, _COPIED)) for _ in range(2))
    with torch.inference_mode():
        computed, copied = [], []
        for _ in range(rounds):
            computed.append(_rate(lambda: torch.mm(one, other, out=made), _COMPUTING))
            copied.append(_rate(lambda: target.copy_(source), _COPYING))
            time.sleep(_PAUSE)  # a disturbance of one reading is over by the next
    return HostSpeed(statistics.median(computed), statistics.median(copied) * 2 * _COPIED / _MB)


def _allocate_pages(memory: mmap.mmap) -> torch.Tensor:
    """Return memory as a tensor with every page resident."""
    found = torch.frombuffer(memory, dtype=torch.uint8)
    return found.fill_(1)


def _rate(call: Callable[[], Any], seconds: float) -> float:
    """Return calls per millisecond: of processor time on one thread, of wall time on several."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    count, ends, begin = 0, time.perf_counter() + seconds, clock()
    while time.perf_counter() < ends:
        call()
        count += 1
    return count / max((clock() - begin) * 1e3, 1e-6)
