"""Settings: switches of torch that hold for a whole process and change what its ops compute.

A program may turn them at any time, so each call carries those of the controller to its worker.
"""

from __future__ import annotations

from typing import Any

import torch

Settings = tuple[Any, ...]
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_SWITCHES = (
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
)


def current() -> Settings:
    """Those of this process."""
    return (_NAMES[torch.get_default_dtype()], *[switch() for switch in _SWITCHES])


def follow(settings: Any) -> None:
    """Make them those of this process too."""
    if settings == current():
        return
    dtype, deterministic, warn_only, precision, flash, efficient, plain, own, *cudnn = settings
    torch.set_default_dtype(getattr(torch, dtype))
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_math_sdp(plain)
    torch.backends.cuda.enable_cudnn_sdp(own)
    for name, value in zip(("enabled", "benchmark", "deterministic"), cudnn, strict=True):
        setattr(torch.backends.cudnn, name, value)
