"""Worker statistics: peak memory and speed, which each worker of a pool measures itself, and links between hosts."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Sequence

import torch

from gemini.errors import WorkerError
from gemini.profiling.host_speed import HostSpeed, measure_speed
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_handle import WorkerHandle
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import MeasuredPeak, MeasuredSpeed, MeasureLink, MeasurePeak, MeasureSpeed
from gemini.runtime.transport.channel import ChannelClosed
from gemini.schedule.link_costs import Links

_ROUNDS = 2  # this process and the workers alternate, since the speed of a machine drifts
Speeds = tuple[HostSpeed, tuple[HostSpeed, ...]]
_SIZES = (1 << 10, 1 << 18, 1 << 22)  # bytes of messages between hosts
_TRIES, _LONG_MS = 5, 40.0  # a message of this time suffices: larger ones are not tried
_STEP = 2 ** (1 / 8)  # links are rounded to powers of it: a plan in the cache serves the next run
_links: weakref.WeakKeyDictionary[WorkerPool, Links | None] = weakref.WeakKeyDictionary()
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


# ── links ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def measure_links(pool: WorkerPool, local: Links) -> Links:
    """Return the links between the workers of a pool; those between workers of one host are `local`.

    Every other host exchanges messages with this one. Two hosts of which neither is this one have the slower of their
    links to this host. Measured once per pool.
    """
    if pool not in _links:
        _links[pool] = _measure_links(pool, local)
    return _links[pool] or local


def _measure_links(pool: WorkerPool, local: Links) -> Links | None:
    hosts = [worker.host for worker in pool.workers]
    if not any(worker.is_remote for worker in pool.workers):
        return None
    found = {"": (0.0, math.inf)}
    for worker in pool.workers:
        if worker.host not in found:
            found[worker.host] = _measure_link(worker)

    def link(source: str, target: str) -> tuple[float, float]:
        if source == target:
            return float(local.latency), float(local.bandwidth)  # type: ignore[arg-type]
        ends = found[source], found[target]
        return max(one[0] for one in ends), min(one[1] for one in ends)

    table = [[link(source, target) for target in hosts] for source in hosts]
    return Links(*(tuple(tuple(entry[at] for entry in row) for row in table) for at in range(2)))


def _measure_link(worker: WorkerHandle) -> tuple[float, float]:
    """Return the latency in ms and the bandwidth in bytes per ms of the link to a worker's host."""
    times: list[float] = []
    for size in _SIZES:
        contents, took = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(_TRIES):
            began = time.perf_counter()
            worker.ask(MeasureLink(worker.next_number(), contents), "measure its link")
            took.append((time.perf_counter() - began) * 500)
            if took[-1] > _LONG_MS:
                break
        times.append(min(took))
        if times[-1] > _LONG_MS:
            break
    more = max(times[-1] - times[0], 1e-3)
    size = _SIZES[len(times) - 1] - _SIZES[0] if len(times) > 1 else _SIZES[0]
    return _round(times[0]), _round(size / more)


def _round(value: float) -> float:
    return float(_STEP ** round(math.log(value, _STEP)))
