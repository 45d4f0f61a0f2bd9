"""Device descriptions: peak rates as data, for estimates without the device.

The figures are those of the device classes in gemini/cluster/presets.json; the efficiencies, the share of a peak that
kernels reach, are replaced by measured ones in `roofline.calibrate`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemini.cluster import DeviceClass
from gemini.cluster.cluster_file import find_device_class, presets
from gemini.errors import ProfileError
from gemini.nearest_name import remedy

_DTYPES = {"bfloat16": ("bf16", "fp16"), "float16": ("fp16", "bf16"), "float32": ("fp32", "tf32"), "float64": ("fp64",)}
_VECTOR_SHARE = 0.07  # of the matrix rate, for elementwise arithmetic where a class has no rate for fp32


@dataclass(frozen=True)
class DeviceSpec:
    """Peak rates of a device and the efficiencies of kernels."""

    name: str
    matrix_tflops: dict[str, float]  # by element type; unlisted types run at the float32 rate
    vector_tflops: float
    bandwidth_gb: float  # 10⁹ bytes per second of its memory
    kernel_us: float  # the fixed time of a kernel
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.75
    calibrated: bool = field(default=False)

    def matrix_rate(self, dtype: str) -> float:
        """Return the operations per second of the matrix units."""
        return self.matrix_tflops.get(dtype, self.matrix_tflops["float32"]) * 1e12


def describe_class(device: DeviceClass) -> DeviceSpec:
    """Return the description of a device class."""
    slowest = min(device.tflops.values())
    rates = {
        dtype: next((device.tflops[name] for name in names if name in device.tflops), slowest)
        for dtype, names in _DTYPES.items()
    }
    vector = device.tflops.get("fp32", _VECTOR_SHARE * max(device.tflops.values()))
    return DeviceSpec(
        device.name, rates, vector, device.bandwidth_gb, device.kernel_us, device.matrix_efficiency,
        device.memory_efficiency,
    )  # fmt: skip


SPECS = {name: describe_class(find_device_class(name)) for name in presets()["devices"]}


def find_spec(name: str) -> DeviceSpec:
    """Return the description of a device; raises ProfileError listing the valid names."""
    if name.lower() not in SPECS:
        raise ProfileError(f"unknown device description {name!r}\n    → {remedy(name.lower(), sorted(SPECS))}")
    return SPECS[name.lower()]


def spec_like(kind: str, device_name: str) -> DeviceSpec:
    """Return the description nearest to a device: by product name, else the default of its kind."""
    if kind == "cpu":
        return SPECS["cpu"]
    words = device_name.lower().replace(" ", "").replace("-", "")
    fitting = [name for name in SPECS if name.split("-")[0] in words]
    return SPECS[fitting[0]] if fitting else SPECS["a100"]
