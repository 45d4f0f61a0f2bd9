"""Probes: a few ordinary nodes, measured to calibrate a description for models that cannot be run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemini.profiling.device import Backward, Device
from gemini.profiling.robust import summarize
from gemini.profiling.work import Work, WorkCounter

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
    ends = [given, *module.parameters()]

    def prepare(result: torch.Tensor) -> Backward:
        gradient = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, ends, gradient)

    forward_work, backward_work = _count(lambda: module(given), prepare)
    device.time(lambda: module(given), prepare)
    times = [device.time(lambda: module(given), prepare, 1.0) for _ in range(_TRIES)]
    return [
        (forward_work, summarize([t.forward for t in times]).ms),
        (backward_work, summarize([t.backward for t in times]).ms),
    ]


def _count(forward: Callable[[], Any], prepare: Callable[[Any], Backward]) -> tuple[Work, Work]:
    with WorkCounter() as counter:
        result = forward()
        first = counter.take()
        backward = prepare(result)
        counter.take()
        backward()
        return first, counter.take()
