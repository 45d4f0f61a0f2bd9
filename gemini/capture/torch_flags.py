"""Switches of torch that hold for a whole process and change what its ops compute.

A program may turn them at any time, and a forward may ask for them, so a plan is for calls with the same ones, and each
call carries those of the controller to its worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from gemini.quiet_warnings import muted

TorchFlags = tuple[Any, ...]
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_GETTERS = (
    torch._C._get_deterministic_algorithms,  # without the functions in Python around them: every call asks
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_float32_matmul_precision,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_mkldnn_enabled,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
)
_OF_BACKWARD = 2  # the last of them
_filters: tuple[list[Any], tuple[Any, ...]] = [], ()  # of warnings, as last seen, and those of them that count
_LEAST = 5e-324  # a denormal number, which is none where these are flushed to zero


def current_flags() -> TorchFlags:
    """Those of this process."""
    return (_NAMES[torch.get_default_dtype()], _LEAST * 1.0 == 0.0, *[switch() for switch in _GETTERS])


def error_filters() -> tuple[Any, ...]:
    """Which warnings are errors: a call that raised none says that others raise none only while this is the same."""
    global _filters  # noqa: PLW0603 - every op that is recorded asks
    filters = warnings.filters
    if filters != _filters[0]:
        _filters = [*filters], tuple(filters) if any(one[0] == "error" for one in filters) else ()
    return _filters[1]


def apply_flags(switches: Any) -> None:
    """Make them those of this process too."""
    if switches == current_flags():
        return
    dtype, flushes, prefer_deterministic, warn_only, precision, flash, efficient, plain, own, *others = switches
    *cudnn, mkldnn, anomaly, checks = others
    torch.set_default_dtype(getattr(torch, dtype))
    torch.use_deterministic_algorithms(prefer_deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(plain)
    torch.backends.cuda.enable_cudnn_sdp(own)
    for name, value in zip(("enabled", "benchmark", "deterministic"), cudnn, strict=True):
        setattr(torch.backends.cudnn, name, value)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch.set_anomaly_enabled(anomaly, checks)
    torch.set_flush_denormal(flushes)


@contextmanager
def use_flags(switches: TorchFlags) -> Iterator[None]:
    """With those of the time of a call, and those of now for its backward."""
    now = current_flags()
    wanted = (*switches[:-_OF_BACKWARD], *now[-_OF_BACKWARD:])
    if wanted == now:
        yield
        return
    try:
        apply_flags(wanted)
        yield
    finally:
        apply_flags(now)


@contextmanager
def prefer_deterministic(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Prefer deterministic kernels if one of the tensors lives on an accelerator."""
    if all(tensor.device.type in ("cpu", "meta") for tensor in tensors):
        yield
        return
    before = torch.get_deterministic_debug_mode()
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory
    flags = cudnn.benchmark, cudnn.deterministic
    with muted(message=".*deterministic.*"):
        try:
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = False
            cudnn.benchmark, cudnn.deterministic = False, True
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill
            cudnn.benchmark, cudnn.deterministic = flags
