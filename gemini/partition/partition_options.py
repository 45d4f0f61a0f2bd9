"""Partition options: objective, workers and constraints. Validated on construction; all faults are reported at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gemini.errors import PartitionError
from gemini.schedule.link_costs import FREE, Links

WEIGHTS = ("both", "forward", "backward")
TIED = ("together", "sync")


@dataclass(frozen=True)
class Worker:
    """A device that runs stages: its speed relative to the profiled one, and its memory."""

    speed: float = 1.0
    memory_mb: float | None = None  # None: no limit


@dataclass(frozen=True, kw_only=True)
class Options:
    """The objective, the workers and the constraints of a partition.

    A scope (`bert.encoder.layer.3`) stands for all nodes of that module. A *part* is the index of a worker.
    """

    workers: tuple[Worker, ...] = ()  # one per part; empty: identical workers without limits
    mixed: bool | None = None  # several stages per worker; None: the partitioner decides
    chunks: int = 1  # stages per worker, for partitioners that take a number
    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────
    weight: str = "both"  # the balanced time: forward, backward or both
    ratio: float = 1.0  # factor on the measured backward time
    recompute: bool = False  # activations are recomputed in backward
    links: Links = FREE  # ms and bytes; see `LinkProfile.links()`
    sending_ms: float = 0.0  # worker time per MB sent; if set, links cost their latency only
    action_ms: float = 0.0  # worker time around each forward and each backward
    slack: float = 0.01  # relative loss of balance accepted for fewer bytes
    noise: float | None = None  # of the profile: within it plainer cuts win; None: that of the profile
    # ── constraints ──────────────────────────────────────────────────────────────────────────────────────────────────
    together: tuple[tuple[str, ...], ...] = ()  # groups of scopes that must share a stage
    pins: Mapping[str, int] = field(default_factory=dict)  # scope → part
    uncut: tuple[str, ...] = ()  # scopes that must not be cut inside
    tied: str = "sync"  # tied weights: their users share a stage, or their gradients are summed
    random_order: bool = True  # stages use the random generator in the model's order
    # ── assumptions of memory and analysis ───────────────────────────────────────────────────────────────────────────
    schedule: str = "1f1b"
    micro_batches: int = 8
    optimizer_copies: float = 2.0  # per trainable parameter, besides its gradient
    # ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────
    seed: int = 0
    time_limit: float = 10.0  # seconds, for partitioners that search
    near: float = 0.0  # relative gap to the lower bound at which a search may stop
    rivals: bool = True  # `exact` also compares with the other partitioners

    def __post_init__(self) -> None:
        faults = list(self._shape_faults())
        if not faults:
            object.__setattr__(self, "workers", tuple(self.workers))
            object.__setattr__(self, "together", tuple(tuple(group) for group in self.together))
            object.__setattr__(self, "uncut", tuple(self.uncut))
            object.__setattr__(self, "pins", dict(self.pins))
            faults = list(self._faults())
        if faults:
            raise PartitionError("invalid partition options:\n" + "\n".join(f"  - {fault}" for fault in faults))

    def _shape_faults(self) -> Iterator[str]:
        """Report fields of a wrong type."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        if not _is_group(values["uncut"]):
            yield f"uncut {values['uncut']!r}; expected a tuple of scopes"
        groups = values["together"]
        if isinstance(groups, str) or not isinstance(groups, Iterable) or not all(map(_is_group, groups)):
            yield f"together {groups!r}; expected a tuple of groups, each a tuple of scopes"
        if not isinstance(values["pins"], Mapping):
            yield f"pins {values['pins']!r}; expected a dict from scope to part"
        workers = values["workers"]
        if not isinstance(workers, Iterable) or not all(isinstance(worker, Worker) for worker in workers):
            yield f"workers {workers!r}; expected Worker(speed=…, memory_mb=…) for each"
        if not isinstance(values["links"], Links):
            yield f"links {values['links']!r}; expected Links(latency, bandwidth)"

    def _faults(self) -> Iterator[str]:
        if self.weight not in WEIGHTS:
            yield f"weight {self.weight!r}; expected one of {', '.join(WEIGHTS)}"
        if self.tied not in TIED:
            yield f"tied {self.tied!r}; expected one of {', '.join(TIED)}"
        for name in ("ratio", "sending_ms", "action_ms", "slack", "optimizer_copies", "time_limit", "near"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                yield f"{name} {value!r}; expected a finite number, 0 or more"
        if self.noise is not None and (not _is_number(self.noise) or self.noise < 0):
            yield f"noise {self.noise!r}; expected a finite number, 0 or more, or None"
        for name in ("chunks", "micro_batches"):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                yield f"{name} {value!r}; expected an integer, 1 or more"
        if not _is_whole(self.seed):
            yield f"seed {self.seed!r}; expected an integer"
        if self.mixed is False and _is_whole(self.chunks) and self.chunks > 1:
            yield f"{self.chunks} chunks per worker contradict one stage per worker (mixed=False)"
        for at, worker in enumerate(self.workers):
            if not _is_number(worker.speed) or worker.speed <= 0:
                yield f"worker {at} has speed {worker.speed!r}; expected a number above 0"
            if worker.memory_mb is not None and (not _is_number(worker.memory_mb) or worker.memory_mb <= 0):
                yield f"worker {at} has {worker.memory_mb!r} MB of memory; expected a number above 0, or None"
        for scope, part in self.pins.items():
            if not _is_whole(part) or part < 0:
                yield f"{scope!r} is pinned to part {part!r}; parts are integers from 0"

    def workers_for(self, nparts: int) -> tuple[Worker, ...]:
        """Return one worker per part."""
        if not self.workers:
            return (Worker(),) * nparts
        if len(self.workers) != nparts:
            raise PartitionError(
                f"{len(self.workers)} workers are described for {nparts} parts\n    → describe one per part, or none"
            )
        return self.workers

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Options:
        """Build options from plain data."""
        known = {f.name for f in fields(Options)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise PartitionError(f"unknown options: {', '.join(unknown)}\n    → known are {', '.join(sorted(known))}")
        made = dict(data)
        try:
            made["workers"] = tuple(Worker(**worker) for worker in data.get("workers", ()))
            made["links"] = Links(**data["links"]) if "links" in data else FREE
            return Options(**made)
        except TypeError as error:
            raise PartitionError(f"invalid partition options: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_group(value: Any) -> bool:
    return not isinstance(value, str) and isinstance(value, Iterable) and all(isinstance(scope, str) for scope in value)
