"""Probes: a few ordinary nodes, measured to calibrate a description for models that cannot be run here."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from gemini.autograd_engine import differentiate
from gemini.profiling.flop_count import Work, WorkCounter
from gemini.profiling.measured_device import Device, Stopwatch
from gemini.profiling.robust_statistics import summarize

_TRIES = 5


def measure_probes(device: Device) -> list[tuple[Work, float]]:
    """(work, ms) of the forward and of the backward pass of each probe."""
    found: list[tuple[Work, float]] = []
    for module, shape in _probes():
        found += _measure(device, module.to(device.torch_device), shape)
    return found


def _probes() -> list[tuple[nn.Module, tuple[int, ...]]]:
    with torch.random.fork_rng(devices=[]):
        return [
            (nn.Linear(1024, 1024), (512, 1024)),
            (nn.Linear(512, 2048), (256, 512)),
            (nn.Linear(64, 64), (8, 64)),
            (nn.LayerNorm(1024), (1024, 1024)),
            (nn.GELU(), (1024, 2048)),
            (nn.Softmax(-1), (16, 256, 256)),
            (nn.ReLU(), (16, 16)),
            (nn.Conv2d(64, 64, 3, padding=1), (8, 64, 32, 32)),
        ]


def _measure(device: Device, module: nn.Module, shape: tuple[int, ...]) -> list[tuple[Work, float]]:
    given = torch.ones(shape, device=device.torch_device, requires_grad=True)
    ends = (given, *module.parameters())
    gradient = torch.ones_like(module(given))
    forward_work, backward_work = _count(module, given, ends, gradient)
    earlier: Stopwatch | None = None
    for _ in range(2 if device.runs_behind else 1):
        watch = device.stopwatch(earlier)
        for index in range(_TRIES):
            result = watch.time(("forward", index), lambda: module(given))
            watch.time(("backward", index), partial(differentiate, (result,), (gradient,), ends), 2)
        earlier = watch
    spans = watch.read()
    return [
        (work, summarize([spans[name, index].ms for index in range(_TRIES)]).ms)
        for name, work in (("forward", forward_work), ("backward", backward_work))
    ]


def _count(module: nn.Module, given: Any, ends: tuple[Any, ...], gradient: torch.Tensor) -> tuple[Work, Work]:
    with WorkCounter() as counter:
        result = module(given)
        first = counter.take()
        differentiate((result,), (gradient,), ends)
        return first, counter.take()
