"""Tuning request: what a search may vary, what the user has fixed, and the limits it must keep.

fixed       {"tensor": 8, "schedule": "zb_h1"}       fields of `ParallelConfig` with one value
among       {"micro_batch": (1, 2)}                  fields with several
limits      devices, seconds per step; with `tokens` the money and the hours of the whole training
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gemini.cluster.cluster_description import Cluster
from gemini.errors import ConfigError, Fault
from gemini.nearest_name import remedy
from gemini.schedule.library import LIBRARY
from gemini.tune.layer_cost import CostModel
from gemini.tune.parallel_config import ParallelConfig, field_faults

SEARCHED = (
    "tensor",
    "context",
    "expert",
    "pipeline",
    "chunks",
    "micro_batch",
    "zero",
    "recompute",
    "schedule",
    "order",
)
_LIMITS = ("max_seconds", "max_money", "max_hours", "tokens", "memory_share")


@dataclass(frozen=True)
class TuningRequest:
    """A search for the fastest configuration of one model on one cluster."""

    model: CostModel
    cluster: Cluster
    batch: int
    fixed: Mapping[str, Any] = field(default_factory=dict, hash=False)
    among: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    max_devices: int | None = None  # search device counts up to this instead of using all
    runs_here: bool = False  # only what a run of `gemini_python` on one machine can have
    max_seconds: float | None = None  # of a step
    max_money: float | None = None  # of `tokens`
    max_hours: float | None = None  # for `tokens`
    tokens: float | None = None
    memory_share: float = 1.0  # of the capacity that may be used
    objective: str = "time"  # or money
    finalists: int = 20  # simulated with their schedule
    simulate_seconds: float = 2.0  # for all of them
    composed: int = 3  # of these, for how many a schedule is composed
    compose_seconds: float = 1.0  # for all of them

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise ConfigError(faults, "tuning")

    def _faults(self) -> list[Fault]:
        names = [entry.name for entry in fields(ParallelConfig)]
        faults = [
            Fault(f"unknown field {name!r}", remedy(str(name), names))
            for name in (*self.fixed, *self.among)
            if name not in names
        ]
        faults += [
            Fault(f"{name} is fixed and searched", "give it in one of the two")
            for name in self.fixed
            if name in self.among
        ]
        given = [*self.fixed.items(), *((name, value) for name, values in self.among.items() for value in values)]
        for name, value in given:
            if name in names and (found := field_faults(name, value)):
                faults.append(found[0])
            elif name == "schedule" and value not in LIBRARY and value != "auto":
                faults.append(Fault(f"unknown schedule {value!r}", remedy(str(value), [*LIBRARY, "auto"])))
            elif name == "precision":
                faults += _precision_faults(self.cluster, value)
        for name in ("batch", "max_devices", "finalists"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                faults.append(Fault(f"{name} = {value!r}", "give a whole number, 1 or more"))
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                faults.append(Fault(f"{name} = {value!r}", "give a number above zero"))
        if self.objective not in ("time", "money"):
            faults.append(Fault(f"objective = {self.objective!r}", "choose from time, money"))
        if self.memory_share > 1:
            faults.append(Fault(f"memory_share = {self.memory_share}", "give a share up to 1"))
        return faults or self._contradictions()

    def _contradictions(self) -> list[Fault]:
        faults = []
        priced = self.cluster.check_prices()
        if (self.max_money is not None or self.objective == "money") and not priced:
            what = "a limit or objective in money, and devices without a price"
            faults.append(Fault(what, "give price_per_hour of the devices (--price)"))
        if (self.max_money is not None or self.max_hours is not None) and self.tokens is None:
            faults.append(Fault("a limit of the whole training, without its length", "give tokens"))
        used = math.prod(
            self.fixed[name]
            for name in ("tensor", "context", "pipeline")
            if isinstance(self.fixed.get(name), int) and self.fixed[name] >= 1
        )
        most = self.max_devices or self.cluster.devices
        if used > most:
            what = f"tensor × context × pipeline of {used} fixed, at most {most} devices"
            faults.append(Fault(what, "lower a degree or raise the devices"))
        fixed_devices = self.fixed.get("devices")
        if fixed_devices is not None and fixed_devices > most:
            faults.append(Fault(f"{fixed_devices} devices fixed, at most {most}", "give one of the two"))
        if self.fixed.get("batch", self.batch) != self.batch:
            faults.append(Fault(f"batch {self.fixed['batch']} fixed, batch {self.batch}", "give one of the two"))
        if self.fixed.get("pipeline") == 1 and self.fixed.get("chunks", 1) > 1:
            faults.append(Fault(f"chunks {self.fixed['chunks']} with pipeline 1", "give pipeline 2 or more"))
        return faults

    def device_counts(self) -> list[int]:
        """Return the device counts to search: that of the cluster, or all whole parts of it up to `max_devices`."""
        if self.max_devices is None:
            return [int(self.fixed.get("devices", self.cluster.devices))]
        if "devices" in self.fixed:
            return [int(self.fixed["devices"])]
        per_host = self.cluster.devices_per_host
        counts = [count for count in range(1, per_host + 1) if per_host % count == 0 and count <= self.max_devices]
        hosts = 2
        while hosts * per_host <= self.max_devices:
            counts.append(hosts * per_host)
            hosts *= 2
        last = self.max_devices // per_host * per_host
        return sorted({*counts, last} if last else set(counts))


def _precision_faults(cluster: Cluster, precision: str) -> list[Fault]:
    return [
        Fault(f"{device.name} has no rate for precision {precision!r}", remedy(str(precision), sorted(device.tflops)))
        for device in dict.fromkeys(group.device for group in cluster.groups)
        if precision not in device.tflops
    ]
