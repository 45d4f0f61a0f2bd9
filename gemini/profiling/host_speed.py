"""The speed of this process, now: what it computes and what it copies in a millisecond of processor time.

Two kernels, one after the other, several times: products of matrices that caches hold, which use a core as layers of
a model do, and copies of more than caches hold. Processes that measure at the same time see each other: what one of
them is slower by than one alone is what they take from each other, and what its core is slower by.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ROWS = 192  # of square matrices: three of them fit into the second cache of a core
_COPIED = 16 << 20  # bytes, twice: together more than the caches of a core, and not much for a worker
_MB = float(1 << 20)
_COMPUTING, _COPYING, _PAUSE = 0.02, 0.04, 0.03  # seconds: of one reading each, and until the next
_ROUNDS = 3


class Speed(NamedTuple):
    """Of one process, in a millisecond: products of matrices, and MB read and written by copying."""

    products: float
    moved_mb: float


def measure_speed(rounds: int = _ROUNDS) -> Speed:
    """The speed of this process on its threads; a third of a second."""
    one, other = (torch.full((_ROWS, _ROWS), 0.01, dtype=torch.float32) for _ in range(2))
    made = torch.empty_like(one)
    # Memory of its own, which goes back to the system at once: that of the heap would stay.
    source, target = (_touched(mmap.mmap(-1, _COPIED)) for _ in range(2))
    with torch.inference_mode():
        computed, copied = [], []
        for _ in range(rounds):
            computed.append(_rate(lambda: torch.mm(one, other, out=made), _COMPUTING))
            copied.append(_rate(lambda: target.copy_(source), _COPYING))
            time.sleep(_PAUSE)  # what disturbs one reading is over in the next
    return Speed(statistics.median(computed), statistics.median(copied) * 2 * _COPIED / _MB)


def _touched(memory: mmap.mmap) -> torch.Tensor:
    """Memory as a tensor, every page of which is there."""
    found = torch.frombuffer(memory, dtype=torch.uint8)
    return found.fill_(1)


def _rate(call: Callable[[], Any], seconds: float) -> float:
    """Calls in a millisecond of processor time, on one thread; on several, of the clock's."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    count, ends, begin = 0, time.perf_counter() + seconds, clock()
    while time.perf_counter() < ends:
        call()
        count += 1
    return count / max((clock() - begin) * 1e3, 1e-6)
