"""Device calibration: the efficiencies of a device class from a short run on such a device.

matrix_efficiency        a large product, in the precision of the class
attention_efficiency     causal attention of one long sequence, forward and backward
memory_efficiency        an elementwise operation on a large tensor
kernel_us                very small operations, one after the other
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gemini.cluster.device_class import DeviceClass
from gemini.errors import ConfigError, Fault

_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}
_ROUNDS = 5
_MOST = 0.98  # readings above the described peak count as the peak


def calibrate_device(base: DeviceClass, device: str = "cuda", precision: str = "bf16") -> DeviceClass:
    """Return `base` with the efficiencies measured on a device of this machine."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            [Fault(f"no device {device} on this machine", "calibrate where the device is")], "calibration"
        )
    if precision not in _TYPES:
        raise ConfigError([Fault(f"precision {precision!r} cannot be calibrated", f"give {', '.join(_TYPES)}")])
    dtype = getattr(torch, _TYPES[precision])
    small = not device.startswith("cuda")
    peak, bandwidth = base.flops(precision), base.bandwidth_gb * 1e9
    width = 512 if small else 8192
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    product = _seconds(device, lambda: left @ right)
    large = torch.empty((1 << 20) if small else (1 << 28), device=device, dtype=dtype)
    traffic = _seconds(device, lambda: large.mul_(1.0))
    tiny = torch.zeros(1, device=device)
    kernel = _seconds(device, lambda: [tiny.add_(1) for _ in range(200)]) / 200
    moved = 2 * large.numel() * large.element_size() / (bandwidth * traffic)
    return replace(
        base,
        matrix_efficiency=min(_MOST, 2 * width**3 / (peak * product)),
        attention_efficiency=min(_MOST, _attention_rate(torch, device, dtype, small) / peak),
        memory_efficiency=min(_MOST, moved),
        kernel_us=kernel * 1e6,
    )


def _attention_rate(torch: Any, device: str, dtype: Any, small: bool) -> float:
    """Return operations per second of causal attention, forward and backward."""
    heads, length, size = (2, 256, 64) if small else (16, 8192, 128)
    query, key, value = (
        torch.randn(1, heads, length, size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    def step() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out.backward(out)

    flops = 3.5 * 4 * length * length * size * heads / 2
    return float(flops / _seconds(device, step))


def _seconds(device: str, run: Callable[[], Any]) -> float:
    """Return the fastest of some rounds."""
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    run()
    wait()
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(3):
            run()
        wait()
        best = min(best, (time.perf_counter() - begin) / 3)
    return best
