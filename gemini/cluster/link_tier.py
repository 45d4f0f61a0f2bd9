"""Link tier: one level of the network, from the links inside a host to those between switches.

The tiers of a cluster are nested: tier 0 connects the devices of a host, tier 1 the hosts of a pod (a rail or a leaf
switch), tier 2 the pods (the spine). The bandwidth of a tier is counted per device and direction: a host of 8 devices
with 8 network cards of 50 GB/s has 50 per device, and with a single card 6.25. `shared_by_host` states the latter:
the bandwidth is that of a whole host, shared by those of its devices that communicate at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from gemini.errors import ConfigError, Fault


@dataclass(frozen=True)
class LinkTier:
    """Links of one level. `units` is how many units of the level below it connects; 0: all of them."""

    name: str
    bandwidth_gb: float  # 10⁹ bytes per second and direction
    latency_us: float = 5.0
    efficiency: float = 0.8
    units: int = 0
    shared_by_host: bool = False

    def __post_init__(self) -> None:
        limits = {"bandwidth_gb": 0, "efficiency": 0, "latency_us": -1, "units": -1}
        faults = [
            Fault(
                f"link tier {self.name!r}: {name} = {getattr(self, name)!r}",
                "give a number above zero" if limit == 0 else "give a number of zero or more",
            )
            for name, limit in limits.items()
            if not _exceeds(getattr(self, name), limit)
        ]
        if not faults and not float(self.units).is_integer():
            faults.append(Fault(f"link tier {self.name!r}: units = {self.units!r}", "give a whole number"))
        if faults:
            raise ConfigError(faults, "cluster")

    @property
    def bandwidth(self) -> float:
        """Bytes per second that transfers reach."""
        return self.bandwidth_gb * 1e9 * self.efficiency

    @property
    def latency(self) -> float:
        """Seconds until the first byte arrives."""
        return self.latency_us * 1e-6

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def _exceeds(value: object, limit: int) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return real and (value >= 0 if limit < 0 else value > limit)  # type: ignore[operator]
