"""Peaks: the most memory that workers had in a step, which they are asked for around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.runtime.protocol import MeasuredPeak, MeasurePeak

if TYPE_CHECKING:
    from gemini.runtime.pool.worker_handle import WorkerHandle


def reset_peaks(workers: Sequence[WorkerHandle]) -> None:
    """What workers had until now does not count."""
    for worker in workers:
        worker.ask(MeasurePeak(worker.next_number(), begins=True), "begin a peak of its memory")


def read_peaks(workers: Sequence[WorkerHandle]) -> tuple[float, ...]:
    """MB of each since then; none where one of them cannot tell."""
    asked = "tell the peak of its memory"
    replies = [
        worker.ask(MeasurePeak(worker.next_number()), asked) for worker in workers if worker.device.kind == "cpu"
    ]
    found = [reply.mb for reply in replies if isinstance(reply, MeasuredPeak) and not math.isnan(reply.mb)]
    return tuple(found) if len(found) == len(workers) else ()
