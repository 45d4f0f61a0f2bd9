"""Device class: the rates, the memory and the efficiencies of one kind of device.

Peak rates are the vendor's for dense operands. An efficiency is the share of a peak that large kernels reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from gemini.errors import ConfigError, Fault
from gemini.nearest_name import remedy

_POSITIVE = (
    "memory_gib", "bandwidth_gb", "matrix_efficiency", "fp8_efficiency", "attention_efficiency",
    "tuned_attention_efficiency", "memory_efficiency",
)  # fmt: skip
_NOT_NEGATIVE = ("overlap_loss", "kernel_us", "watts", "price_per_hour")


@dataclass(frozen=True)
class DeviceClass:
    """A kind of device.

    `tflops` has the peak of the matrix units by precision. `price_per_hour` and `watts` are of one device; 0 where
    unknown.
    """

    name: str
    tflops: Mapping[str, float] = field(hash=False)
    memory_gib: float  # 2³⁰ bytes, as drivers report: 79.1 of an H100 with "80 GB"
    bandwidth_gb: float  # 10⁹ bytes per second of its memory
    matrix_efficiency: float = 0.75
    fp8_efficiency: float = 0.75
    attention_efficiency: float = 0.5
    tuned_attention_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    kernel_us: float = 3.0
    overlap_loss: float = 0.1  # share of an overlapped collective's time that computation loses
    watts: float = 0.0
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tflops", MappingProxyType(dict(self.tflops)))
        faults = [
            Fault(f"device {self.name!r}: {name} = {getattr(self, name)!r}", "give a number above zero")
            for name in _POSITIVE
            if not (_is_real(getattr(self, name)) and getattr(self, name) > 0)
        ]
        faults += [
            Fault(f"device {self.name!r}: {name} = {getattr(self, name)!r}", "give a number of zero or more")
            for name in _NOT_NEGATIVE
            if not (_is_real(getattr(self, name)) and getattr(self, name) >= 0)
        ]
        if not self.tflops:
            faults.append(Fault(f"device {self.name!r} has no tflops", 'give the peak by precision: {"bf16": 312}'))
        faults += [
            Fault(f"device {self.name!r}: tflops of {precision} = {rate!r}", "give a number above zero")
            for precision, rate in self.tflops.items()
            if not (_is_real(rate) and rate > 0)
        ]
        if faults:
            raise ConfigError(faults, "cluster")

    @property
    def memory_bytes(self) -> float:
        """The memory in bytes."""
        return self.memory_gib * 2**30

    def flops(self, precision: str) -> float:
        """Return the peak operations per second of the matrix units; an unknown precision is an error."""
        if precision not in self.tflops:
            raise ConfigError(
                [Fault(f"{self.name} has no rate for precision {precision!r}", remedy(precision, sorted(self.tflops)))],
                "cluster",
            )
        return self.tflops[precision] * 1e12

    def product_seconds(self, flops: float, precision: str) -> float:
        """Return the time of the operations of matrix products, without their memory traffic."""
        efficiency = self.fp8_efficiency if precision == "fp8" else self.matrix_efficiency
        return flops / (self.flops(precision) * efficiency)

    def attention_seconds(self, flops: float, precision: str, efficiency: float) -> float:
        """Return the time of fused attention that reaches this share of the peak."""
        return flops / (self.flops(_attention_precision(precision, self.tflops)) * efficiency)

    def traffic_seconds(self, nbytes: float) -> float:
        """Return the time to read or write that many bytes of its memory."""
        return nbytes / (self.bandwidth_gb * 1e9 * self.memory_efficiency)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "tflops": dict(self.tflops)}


def _attention_precision(precision: str, known: Mapping[str, float]) -> str:
    """Attention is computed in 16 bits where matrix products have 8."""
    return "bf16" if precision == "fp8" and "bf16" in known else precision


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
