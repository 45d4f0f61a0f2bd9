"""Cluster description: hosts with devices, and the tiers of links between them.

    groups    8 hosts × 8 H100                 tiers    0  in a host        450 GB/s per device
              4 hosts × 8 A100                          1  a rail            50
                                                        2  the spine         25  (two to one)

A group is a number of equal hosts. With one group the cluster is homogeneous; devices of several classes make it
heterogeneous. All groups share the tiers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gemini.cluster.device_class import DeviceClass
from gemini.cluster.link_tier import LinkTier
from gemini.errors import ConfigError, Fault


@dataclass(frozen=True)
class HostGroup:
    """Equal hosts."""

    device: DeviceClass
    hosts: int
    devices_per_host: int
    processors: int = 0  # of a host that its devices, which are processes, share; 0: each has its own

    def __post_init__(self) -> None:
        faults = [
            Fault(f"{name} = {value!r} of {self.device.name}", "give a whole number, 1 or more")
            for name, value in (("hosts", self.hosts), ("devices_per_host", self.devices_per_host))
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if isinstance(self.processors, bool) or not isinstance(self.processors, int) or self.processors < 0:
            what = f"processors = {self.processors!r} of {self.device.name}"
            faults.append(Fault(what, "give a whole number; 0: each device has its own"))
        if faults:
            raise ConfigError(faults, "cluster")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.hosts * self.devices_per_host


@dataclass(frozen=True)
class Cluster:
    """Hosts and links. `tiers[0]` is inside a host; where there is only one host, no further tier is needed."""

    name: str
    groups: tuple[HostGroup, ...]
    tiers: tuple[LinkTier, ...]

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ConfigError(faults, f"cluster {self.name}")

    def _faults(self) -> list[Fault]:
        faults = []
        if not self.groups:
            faults.append(Fault("no hosts", "give at least one group of hosts"))
        if not self.tiers:
            faults.append(Fault("no link tiers", "give the links inside a host as the first tier"))
        hosts = sum(group.hosts for group in self.groups)
        if len(self.tiers) == 1 and hosts > 1:
            faults.append(Fault(f"{hosts} hosts, and no links between them", "give a second tier"))
        reach = 1
        for level, tier in enumerate(self.tiers[1:], start=1):
            last = level == len(self.tiers) - 1
            if not tier.units and not last:
                faults.append(
                    Fault(
                        f"tier {level} ({tier.name}) has no units", "give how many units of the tier below it connects"
                    )
                )
            reach = hosts if not tier.units else reach * tier.units
        if self.tiers[1:] and reach < hosts:
            faults.append(
                Fault(
                    f"the tiers connect {reach} hosts of {hosts}",
                    "raise `units`, or leave it out in the last tier, which then connects all",
                )
            )
        return faults

    @property
    def devices(self) -> int:
        """The number of devices."""
        return sum(group.devices for group in self.groups)

    @property
    def device(self) -> DeviceClass:
        """The device class of a homogeneous cluster; the first of a heterogeneous one."""
        return self.groups[0].device

    @property
    def device_names(self) -> str:
        """The names of the device classes."""
        return ", ".join(dict.fromkeys(group.device.name for group in self.groups))

    @property
    def is_homogeneous(self) -> bool:
        """Whether all devices are of one class and all hosts have the same number."""
        return len({(group.device.name, group.devices_per_host) for group in self.groups}) == 1

    @property
    def devices_per_host(self) -> int:
        """The number of devices of a host; the least where hosts differ."""
        return min(group.devices_per_host for group in self.groups)

    @property
    def processors(self) -> int:
        """The processors that the devices of one host share; 0 where there are several hosts or each has its own."""
        return self.groups[0].processors if len(self.groups) == 1 and self.groups[0].hosts == 1 else 0

    @property
    def price_per_hour(self) -> float:
        """The price of all devices."""
        return sum(group.devices * group.device.price_per_hour for group in self.groups)

    @property
    def watts(self) -> float:
        """The power of all devices."""
        return sum(group.devices * group.device.watts for group in self.groups)

    def resized(self, devices: int) -> Cluster:
        """Return the same kind of cluster with another number of devices; whole hosts, or a part of one host."""
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise ConfigError([Fault(f"{devices!r} devices", "give a whole number, 1 or more")], f"cluster {self.name}")
        if devices == self.devices:
            return self
        group = self.groups[0]
        if not self.is_homogeneous:
            fault = Fault(f"{devices} devices of {self.devices} of several kinds", "change `hosts` of the groups")
            raise ConfigError([fault], f"cluster {self.name}")
        per_host = min(devices, group.devices_per_host)
        if devices % per_host:
            near = devices // per_host * per_host
            fault = Fault(f"{devices} devices in hosts of {per_host}", f"give {near} or {near + per_host}")
            raise ConfigError([fault], f"cluster {self.name}")
        return replace(self, groups=(replace(group, hosts=devices // per_host, devices_per_host=per_host),))

    def with_device(self, device: DeviceClass) -> Cluster:
        """Return a homogeneous cluster with another device class."""
        group = self.groups[0]
        return replace(self, groups=(HostGroup(device, sum(one.hosts for one in self.groups), group.devices_per_host),))

    def tier_sizes(self) -> tuple[int, ...]:
        """Return how many devices one unit of each tier holds: a host, a pod, …; the last holds all."""
        sizes = [self.devices_per_host]
        for level, tier in enumerate(self.tiers[1:], start=1):
            last = level == len(self.tiers) - 1
            sizes.append(max(self.devices, sizes[-1]) if last else sizes[-1] * max(1, tier.units))
        return tuple(sizes)

    def device_bandwidth(self, tier: int) -> float:
        """Return the bytes per second of one device at a tier when all devices of a host communicate."""
        links = self.tiers[tier]
        return links.bandwidth / (self.devices_per_host if links.shared_by_host else 1)

    def check_prices(self) -> bool:
        """Return whether every device has a price."""
        return all(group.device.price_per_hour > 0 for group in self.groups) and not math.isinf(self.price_per_hour)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values that `read_cluster` reads back."""
        return {
            "name": self.name,
            "groups": [
                {
                    "device": group.device.to_dict(),
                    "hosts": group.hosts,
                    "devices_per_host": group.devices_per_host,
                    "processors": group.processors,
                }
                for group in self.groups
            ],
            "tiers": [tier.to_dict() for tier in self.tiers],
        }
