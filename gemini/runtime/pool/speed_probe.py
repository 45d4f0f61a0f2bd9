"""Probing: how fast all workers are while they all compute, and how fast one process is alone.

Where the cores of a machine differ, or take from each other, that is measured by those who will do the work, at the
places where they will do it. Asked once; workers have nothing else to do meanwhile.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.errors import WorkerError
from gemini.profiling.host_speed import Speed, measure_speed
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.protocol import MeasuredSpeed, MeasureSpeed
from gemini.runtime.transport.channel import ChannelClosed

if TYPE_CHECKING:
    from gemini.runtime.pool.worker_pool import WorkerPool

_TIMES = 2  # this process and the workers, in turn: a machine's speed changes
Speeds = tuple[Speed, tuple[Speed, ...]]


_known: weakref.WeakKeyDictionary[WorkerPool, Speeds | None] = weakref.WeakKeyDictionary()


def measure_speeds(pool: WorkerPool) -> Speeds | None:
    """The speed of this process alone, and that of every worker while all are at it; as it was when first asked for.

    None where a worker cannot tell.
    """
    if pool not in _known:
        _known[pool] = _measured(pool) if pool.workers else None
    return _known[pool]


def _measured(pool: WorkerPool) -> Speeds | None:
    alone: list[Speed] = []
    together: list[list[Speed]] = []
    for _ in range(_TIMES):
        alone.append(measure_speed())
        found = _ask(pool)
        if found is None:
            return None
        together.append(found)
    return _middle(alone), tuple(map(_middle, zip(*together, strict=True)))


def _ask(pool: WorkerPool) -> list[Speed] | None:
    with DeferredSignals():
        asked = []
        for worker in pool.workers:
            if worker.loss:
                raise WorkerError(worker.loss)
            worker.last, request = "a probe of its speed", MeasureSpeed(worker.next_number())
            try:
                with worker._telling:
                    worker.link.send(request)
            except ChannelClosed:
                raise worker._death() from None
            asked.append((worker, request))
        replies = [worker._wait(request.number, worker.timeout) for worker, request in asked]
    if not all(isinstance(reply, MeasuredSpeed) for reply in replies):
        return None
    return [Speed(reply.products, reply.moved_mb) for reply in replies]


def _middle(speeds: Sequence[Speed]) -> Speed:
    return Speed(*(statistics.median(values) for values in zip(*speeds, strict=True)))
