"""Roofline model: times from work and a device description, and its calibration.

A kernel takes the longer of its arithmetic and its memory traffic, plus a fixed time. Calibration fits the efficiency
of arithmetic, the efficiency of bandwidth and the fixed time to measured nodes, or to probe modules where the model
cannot run; the fit is linear, since the description decides which of the two bounds a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.autograd_engine import differentiate
from gemini.profiling.device_specs import DeviceSpec
from gemini.profiling.flop_count import KernelCounts, WorkCounter
from gemini.profiling.measured_device import Device, Stopwatch
from gemini.profiling.reading_statistics import summarize

_LEAST, _MOST = 0.005, 1.5  # plausible range of efficiencies


def estimate_ms(work: KernelCounts, spec: DeviceSpec) -> float:
    """Return the time of some work on a device (ms)."""
    compute, memory, kernels = _ideal_times(work, spec)
    return compute / spec.compute_efficiency + memory / spec.memory_efficiency + kernels * spec.kernel_us * 1e-3


def _ideal_times(work: KernelCounts, spec: DeviceSpec) -> tuple[float, float, int]:
    """Return the ideal ms of compute-bound kernels, that of memory-bound kernels, and the number of kernels."""
    compute = memory = 0.0
    for kernel in work.kernels:
        rate = spec.matrix_rate(kernel.dtype) if kernel.matrix else spec.vector_tflops * 1e12
        arithmetic = kernel.flops / rate * 1e3
        traffic = kernel.nbytes / (spec.bandwidth_gb * 1e9) * 1e3
        if arithmetic / spec.compute_efficiency > traffic / spec.memory_efficiency:
            compute += arithmetic * kernel.count
        else:
            memory += traffic * kernel.count
    return compute, memory, work.count


def calibrate(spec: DeviceSpec, measured: Sequence[tuple[KernelCounts, float]]) -> DeviceSpec:
    """Return the description with efficiencies fitted to measured times (ms); unchanged without measurements."""
    usable = [(work, ms) for work, ms in measured if ms > 0 and work.count]
    if not usable:
        return spec
    for _ in range(2):  # efficiencies decide what bounds a kernel, so fit again with the better ones
        spec = _fit(spec, usable)
    return spec


def _fit(spec: DeviceSpec, measured: list[tuple[KernelCounts, float]]) -> DeviceSpec:
    table = np.array([_ideal_times(work, spec) for work, _ in measured], dtype=float)
    times = np.array([ms for _, ms in measured])
    # Between relative and absolute error: large nodes matter more, small ones still count.
    weights = 1.0 / np.sqrt(times)
    best, best_error = None, np.inf
    for size in (3, 2, 1):
        for columns in combinations(range(3), size):
            part = table[:, columns]
            if not part.any():
                continue
            found, *_ = np.linalg.lstsq(part * weights[:, None], times * weights, rcond=None)
            error = float(np.square((part @ found - times) * weights).sum())
            if (found >= 0).all() and error < best_error:
                best, best_error = dict(zip(columns, found.tolist(), strict=True)), error
    if best is None:
        return spec
    return replace(
        spec,
        compute_efficiency=_share(best.get(0), spec.compute_efficiency),
        memory_efficiency=_share(best.get(1), spec.memory_efficiency),
        kernel_us=best.get(2, 0.0) * 1e3 if 2 in best else spec.kernel_us,
        calibrated=True,
    )


def _share(slowness: float | None, before: float) -> float:
    return min(_MOST, max(_LEAST, 1 / slowness)) if slowness else before


_TRIES = 5


def measure_probe_modules(device: Device) -> list[tuple[KernelCounts, float]]:
    """Return (work, ms) of the forward and of the backward of each probe module."""
    found: list[tuple[KernelCounts, float]] = []
    for module, shape in _probe_modules():
        found += _measure(device, module.to(device.torch_device), shape)
    return found


def _probe_modules() -> list[tuple[nn.Module, tuple[int, ...]]]:
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


def _measure(device: Device, module: nn.Module, shape: tuple[int, ...]) -> list[tuple[KernelCounts, float]]:
    inputs = torch.ones(shape, device=device.torch_device, requires_grad=True)
    ends = (inputs, *module.parameters())
    gradient = torch.ones_like(module(inputs))
    forward_work, backward_work = _count(module, inputs, ends, gradient)
    earlier: Stopwatch | None = None
    for _ in range(2 if device.is_asynchronous else 1):
        watch = device.stopwatch(earlier)
        for index in range(_TRIES):
            result = watch.time(("forward", index), lambda: module(inputs))
            watch.time(("backward", index), partial(differentiate, (result,), (gradient,), ends), 2)
        earlier = watch
    spans = watch.read()
    return [
        (work, summarize([spans[name, index].ms for index in range(_TRIES)]).ms)
        for name, work in (("forward", forward_work), ("backward", backward_work))
    ]


def _count(
    module: nn.Module, inputs: Any, ends: tuple[Any, ...], gradient: torch.Tensor
) -> tuple[KernelCounts, KernelCounts]:
    with WorkCounter() as counter:
        result = module(inputs)
        first = counter.take()
        differentiate((result,), (gradient,), ends)
        return first, counter.take()
