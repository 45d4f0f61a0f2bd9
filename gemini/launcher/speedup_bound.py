"""Bounding: whether workers can gain at all, in less time than a plan takes.

Workers share the threads of this process among them. So as far as its threads make the model faster already, workers
have nothing to add: with twice as many threads twice as fast, two workers of half as many threads each are, at best,
no faster. A forward on as many threads as a worker has tells how far that is.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from gemini.launcher.auto import Clock
from gemini.runtime.local_mode import here

_IDLE = 1.05  # no plan keeps all workers busy all the time


def at_best_ms(model: nn.Module, args: Any, kwargs: Any, step_ms: float, workers: int) -> float:
    """The least that a step of `step_ms` could take by workers; everything is left as it was.

    0 where that is not known without a plan: on other devices threads do not matter.
    """
    cores = len(os.sched_getaffinity(0))
    threads, own = max(1, cores // workers), min(torch.get_num_threads(), cores)
    if any(one.device.type != "cpu" for one in model.parameters()):
        return 0.0
    slower = 1.0 if own <= threads else _slower(model, args, kwargs, threads)
    return _IDLE * step_ms * slower / min(workers, max(1, cores // threads))


def _slower(model: nn.Module, args: Any, kwargs: Any, threads: int) -> float:
    """How many times as long a forward takes on fewer threads."""
    from gemini.ir.call_binding import Call
    from gemini.runtime.pipelined.without_hooks import hookless
    from gemini.snapshot.model_state import Saved

    call, before = Call(args, kwargs), torch.get_num_threads()
    saved = Saved(model, watch=True)
    taken = []
    try:
        with here(), hookless(model), saved.watching():
            for count in (before, threads, before):  # the first is slower than it need be
                torch.set_num_threads(count)
                given = call.arguments()
                clock = Clock()
                model(*given[0], **given[1])
                taken.append(clock.ms())
                saved.restore()
    finally:
        torch.set_num_threads(before)
        saved.restore()
    return max(1.0, taken[1] / max(min(taken[0], taken[2]), 1e-6))
