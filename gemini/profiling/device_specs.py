"""Device descriptions: peak rates as data, for estimates without the device.

Peak rates are the vendors' for dense operands; an efficiency is the share of the peak that real kernels reach, which
`roofline.calibrate` replaces by a measured one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemini.errors import ProfileError
from gemini.nearest_name import remedy


@dataclass(frozen=True)
class DeviceSpec:
    """Peak rates of a device and the efficiencies of kernels."""

    name: str
    matrix_tflops: dict[str, float]  # by element type; unlisted types run at the float32 rate
    vector_tflops: float
    bandwidth_gb: float  # GB/s of its memory
    memory_gb: float
    kernel_us: float  # the fixed time of a kernel
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.75
    link_gb: float = 0.0  # GB/s to a neighbour
    calibrated: bool = field(default=False)

    def matrix_rate(self, dtype: str) -> float:
        """Return the operations per second of the matrix units."""
        return self.matrix_tflops.get(dtype, self.matrix_tflops["float32"]) * 1e12


# name: matrix TFLOP/s at half, single and double precision; GB/s and GB of memory; GB/s to a neighbour
_GPUS = {
    "b200": (2250, 75, 37, 8000, 180, 900),
    "h200": (989, 67, 67, 4800, 141, 450),
    "h100": (989, 67, 67, 3350, 80, 450),
    "h100-pcie": (756, 51, 51, 2000, 80, 64),
    "a100": (312, 19.5, 19.5, 2039, 80, 300),
    "a100-40gb": (312, 19.5, 19.5, 1555, 40, 300),
    "v100": (125, 15.7, 7.8, 900, 32, 150),
    "l40s": (362, 91.6, 1.4, 864, 48, 32),
    "l4": (121, 30.3, 0.5, 300, 24, 32),
    "a10": (125, 31.2, 1.0, 600, 24, 32),
    "t4": (65, 8.1, 0.25, 320, 16, 16),
    "rtx4090": (165, 82.6, 1.3, 1008, 24, 32),
}
_GPU_KERNEL_US = 3.0

SPECS = {
    name: DeviceSpec(
        name,
        {"float32": single, "bfloat16": half, "float16": half, "float64": double},
        single,
        bandwidth,
        memory,
        _GPU_KERNEL_US,
        link_gb=link,
    )
    for name, (half, single, double, bandwidth, memory, link) in _GPUS.items()
}
# Two cores of a current server; calibrate it, since CPUs differ far more than GPUs of one name.
SPECS["cpu"] = DeviceSpec(
    "cpu", {"float32": 0.2, "bfloat16": 0.2, "float16": 0.05, "float64": 0.1}, 0.05, 20, 16, 5.0, link_gb=5
)


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
