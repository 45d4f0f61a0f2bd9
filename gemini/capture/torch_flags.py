"""Torch flags: process-wide settings of torch that change the results of its ops.

User code may set them at any time, and a forward may read them, so a plan holds for calls with equal flags, and each
call sends those of the controller to its worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from gemini.quiet_warnings import mute_warnings

TorchFlags = tuple[Any, ...]
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_GETTERS = (
    torch._C._get_deterministic_algorithms,  # the C functions: they run in every call
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
_BACKWARD_FLAGS = 2  # the last ones
_filters: tuple[list[Any], tuple[Any, ...]] = [], ()  # the last warning filters, and those that matter
_DENORMAL = 5e-324


def current_flags() -> TorchFlags:
    """Return the flags of this process."""
    return (_NAMES[torch.get_default_dtype()], _DENORMAL * 1.0 == 0.0, *[getter() for getter in _GETTERS])


def error_filters() -> tuple[Any, ...]:
    """Return the warning filters if some make warnings errors: equal filters raise on the same calls."""
    global _filters  # noqa: PLW0603 - called for every recorded op
    filters = warnings.filters
    if filters != _filters[0]:
        _filters = [*filters], tuple(filters) if any(one[0] == "error" for one in filters) else ()
    return _filters[1]


def apply_flags(flags: Any) -> None:
    """Set the flags of this process."""
    if flags == current_flags():
        return
    dtype, flushes, deterministic, warn_only, precision, flash, efficient, plain, own, *others = flags
    *cudnn, mkldnn, anomaly, checks = others
    torch.set_default_dtype(getattr(torch, dtype))
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
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
def use_flags(flags: TorchFlags) -> Iterator[None]:
    """Use the flags of an earlier call, but the current ones for its backward."""
    now = current_flags()
    wanted = (*flags[:-_BACKWARD_FLAGS], *now[-_BACKWARD_FLAGS:])
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
    """Prefer deterministic kernels if one of the tensors is on an accelerator.

    Atomic additions and the choice of algorithms make two runs differ; the remaining noise is measured
    (`gemini.capture.verify.graph_check`).
    """
    if all(tensor.device.type in ("cpu", "meta") for tensor in tensors):
        yield
        return
    before = torch.get_deterministic_debug_mode()
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory
    flags = cudnn.benchmark, cudnn.deterministic
    with mute_warnings(message=".*deterministic.*"):
        try:
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = False
            cudnn.benchmark, cudnn.deterministic = False, True
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill
            cudnn.benchmark, cudnn.deterministic = flags
