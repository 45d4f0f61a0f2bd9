"""Speedup bound: the shortest possible step with workers, computed faster than a plan.

Workers share the threads of this process. If twice the threads make the model twice as fast, two workers with half the
threads each are at best as fast. A forward pass on the threads of one worker measures this.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from gemini.launcher.auto import TrialClock
from gemini.runtime.local_mode import run_locally

_IDLE = 1.05  # a plan never has all workers busy all the time


def shortest_step_ms(model: nn.Module, args: Any, kwargs: Any, step_ms: float, workers: int) -> float:
    """Return the shortest possible time of a step of `step_ms` with workers; the model's state is unchanged.

    0 on devices other than the CPU, where the threads of this process do not limit workers.
    """
    cores = len(os.sched_getaffinity(0))
    threads, own = max(1, cores // workers), min(torch.get_num_threads(), cores)
    if any(one.device.type != "cpu" for one in model.parameters()):
        return 0.0
    slowdown = 1.0 if own <= threads else _measure_slowdown(model, args, kwargs, threads)
    return _IDLE * step_ms * slowdown / min(workers, max(1, cores // threads))


def _measure_slowdown(model: nn.Module, args: Any, kwargs: Any, threads: int) -> float:
    """Return the slowdown of a forward pass on `threads` threads."""
    from gemini.capture.module_hooks import without_hooks
    from gemini.ir.call_binding import ModelCall
    from gemini.snapshot.model_state import ModelSnapshot

    call, before = ModelCall(args, kwargs), torch.get_num_threads()
    saved = ModelSnapshot(model, watch=True)
    taken = []
    try:
        with run_locally(), without_hooks(model), saved.watch_writes():
            for count in (before, threads, before):  # the first run is a warm-up
                torch.set_num_threads(count)
                inputs = call.arguments()
                clock = TrialClock()
                model(*inputs[0], **inputs[1])
                taken.append(clock.ms())
                saved.restore()
    finally:
        torch.set_num_threads(before)
        saved.restore()
    return max(1.0, taken[1] / max(min(taken[0], taken[2]), 1e-6))
