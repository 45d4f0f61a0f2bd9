"""Worker statistics: peak memory and speed of the workers of a pool, which each worker measures itself."""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Sequence

from gemini.errors import WorkerError
from gemini.profiling.host_speed import HostSpeed, measure_speed
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_handle import WorkerHandle
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import MeasuredPeak, MeasuredSpeed, MeasurePeak, MeasureSpeed
from gemini.runtime.transport.channel import ChannelClosed

_ROUNDS = 2  # this process and the workers alternate, since the speed of a machine drifts
Speeds = tuple[HostSpeed, tuple[HostSpeed, ...]]
_known: weakref.WeakKeyDictionary[WorkerPool, Speeds | None] = weakref.WeakKeyDictionary()


# ── peak memory ────────────────────────────────────────────────────────────────────────────────────────────────────
def reset_peaks(workers: Sequence[WorkerHandle]) -> None:
    """Restart the measurement of peak memory in the workers."""
    for worker in workers:
        worker.ask(MeasurePeak(worker.next_number(), begins=True), "reset its peak memory")


def read_peaks(workers: Sequence[WorkerHandle]) -> tuple[float, ...]:
    """Return the peak memory of each worker since the reset in MB; empty if one of them cannot measure it."""
    what = "report its peak memory"
    replies = [worker.ask(MeasurePeak(worker.next_number()), what) for worker in workers if worker.device.kind == "cpu"]
    found = [reply.mb for reply in replies if isinstance(reply, MeasuredPeak) and not math.isnan(reply.mb)]
    return tuple(found) if len(found) == len(workers) else ()


# ── speed ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def measure_speeds(pool: WorkerPool) -> Speeds | None:
    """Return the speed of this process alone and of every worker while all compute; None if a worker cannot measure it.

    Cores of one machine may differ or slow each other down, so those who will do the work measure it, at the same
    time. Measured once per pool, while the workers are idle.
    """
    if pool not in _known:
        _known[pool] = _measure(pool) if pool.workers else None
    return _known[pool]


def _measure(pool: WorkerPool) -> Speeds | None:
    alone: list[HostSpeed] = []
    together: list[list[HostSpeed]] = []
    for _ in range(_ROUNDS):
        alone.append(measure_speed())
        found = _measure_workers(pool)
        if found is None:
            return None
        together.append(found)
    return _median(alone), tuple(map(_median, zip(*together, strict=True)))


def _measure_workers(pool: WorkerPool) -> list[HostSpeed] | None:
    with DeferredSignals():
        sent = []
        for worker in pool.workers:
            if worker.loss:
                raise WorkerError(worker.loss)
            worker.last, request = "a measurement of its speed", MeasureSpeed(worker.next_number())
            try:
                with worker.sending:
                    worker.link.send(request)
            except ChannelClosed:
                raise worker.report_death() from None
            sent.append((worker, request))
        replies = [worker.wait_reply(request.number, worker.timeout) for worker, request in sent]
    if not all(isinstance(reply, MeasuredSpeed) for reply in replies):
        return None
    return [HostSpeed(reply.products, reply.moved_mb) for reply in replies]


def _median(speeds: Sequence[HostSpeed]) -> HostSpeed:
    return HostSpeed(*(statistics.median(values) for values in zip(*speeds, strict=True)))
