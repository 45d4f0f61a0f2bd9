"""Options: what a partition is asked for, beyond the number of parts. Checked when made, all faults at once."""

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
    """What to balance, over which workers, under which constraints.

    A scope (`bert.encoder.layer.3`) stands for all nodes of that module. *Part* is the index of a worker.
    """

    workers: tuple[Worker, ...] = ()  # one a part; empty: all alike, without a limit
    mixed: bool | None = None  # several stages a worker; None: as the partitioner prefers
    chunks: int = 1  # stages a worker, where the partitioner lets one choose
    # ── weights ────────────────────────────────────────────────────────────────────────────────────────────────
    weight: str = "both"  # the time that is balanced: forward, backward or both
    ratio: float = 1.0  # backward counts this much more than it was measured
    recompute: bool = False  # activations are computed again in backward
    links: Links = FREE  # ms and bytes; see `LinkProfile.links()`
    sending_ms: float = 0.0  # of a worker's own time, for each MB that it sends: then links cost their latency only
    action_ms: float = 0.0  # of a worker's own time around each forward and each backward
    slack: float = 0.01  # how much balance may be given up for fewer bytes
    # ── constraints ────────────────────────────────────────────────────────────────────────────────────────────
    together: tuple[tuple[str, ...], ...] = ()  # groups of scopes that share a stage
    pins: Mapping[str, int] = field(default_factory=dict)  # scope → part
    uncut: tuple[str, ...] = ()  # scopes that must not be cut inside
    tied: str = "sync"  # weights used in several places: kept together, or their gradients summed
    random_order: bool = True  # stages draw random numbers in the model's order
    # ── what memory and analysis assume ────────────────────────────────────────────────────────────────────────
    schedule: str = "1f1b"
    micro_batches: int = 8
    optimizer_copies: float = 2.0  # of each trainable parameter, besides its gradient
    # ── search ─────────────────────────────────────────────────────────────────────────────────────────────────
    seed: int = 0
    time_limit: float = 10.0  # seconds, for those that search
    near: float = 0.0  # an answer so close to what is possible at best is good enough
    rivals: bool = True  # `exact` asks what others answer, too

    def __post_init__(self) -> None:
        faults = list(self._shape_faults())
        if not faults:
            object.__setattr__(self, "workers", tuple(self.workers))
            object.__setattr__(self, "together", tuple(tuple(group) for group in self.together))
            object.__setattr__(self, "uncut", tuple(self.uncut))
            object.__setattr__(self, "pins", dict(self.pins))
            faults = list(self._faults())
        if faults:
            raise PartitionError("options of a partition:\n" + "\n".join(f"  - {fault}" for fault in faults))

    def _shape_faults(self) -> Iterator[str]:
        """What is not even of the right kind."""
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        if not _is_group(given["uncut"]):
            yield f"uncut {given['uncut']!r}; it is a tuple of scopes"
        groups = given["together"]
        if isinstance(groups, str) or not isinstance(groups, Iterable) or not all(map(_is_group, groups)):
            yield f"together {groups!r}; it is a tuple of groups, each a tuple of scopes"
        if not isinstance(given["pins"], Mapping):
            yield f"pins {given['pins']!r}; they are a dict of scopes to parts"
        workers = given["workers"]
        if not isinstance(workers, Iterable) or not all(isinstance(worker, Worker) for worker in workers):
            yield f"workers {workers!r}; each is a Worker(speed=…, memory_mb=…)"
        if not isinstance(given["links"], Links):
            yield f"links {given['links']!r}; they are Links(latency, bandwidth)"

    def _faults(self) -> Iterator[str]:
        if self.weight not in WEIGHTS:
            yield f"weight {self.weight!r}; it is one of {', '.join(WEIGHTS)}"
        if self.tied not in TIED:
            yield f"tied {self.tied!r}; it is one of {', '.join(TIED)}"
        for name in ("ratio", "sending_ms", "action_ms", "slack", "optimizer_copies", "time_limit", "near"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                yield f"{name} {value!r}; it is a finite number, 0 or more"
        for name in ("chunks", "micro_batches"):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                yield f"{name} {value!r}; it is a whole number, 1 or more"
        if not _is_whole(self.seed):
            yield f"seed {self.seed!r}; it is a whole number"
        if self.mixed is False and _is_whole(self.chunks) and self.chunks > 1:
            yield f"{self.chunks} chunks a worker, but a worker is to have one stage (mixed=False)"
        for at, worker in enumerate(self.workers):
            if not _is_number(worker.speed) or worker.speed <= 0:
                yield f"worker {at} has speed {worker.speed!r}; it is a number above 0"
            if worker.memory_mb is not None and (not _is_number(worker.memory_mb) or worker.memory_mb <= 0):
                yield f"worker {at} has {worker.memory_mb!r} MB of memory; it is a number above 0, or None"
        for scope, part in self.pins.items():
            if not _is_whole(part) or part < 0:
                yield f"{scope!r} is pinned to part {part!r}; parts are whole numbers from 0"

    def of(self, nparts: int) -> tuple[Worker, ...]:
        """One worker a part."""
        if not self.workers:
            return (Worker(),) * nparts
        if len(self.workers) != nparts:
            raise PartitionError(
                f"{len(self.workers)} workers are described for {nparts} parts\n    → describe one a part, or none"
            )
        return self.workers

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Options:
        """The options of plain data."""
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
            raise PartitionError(f"not options of a partition: {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_group(value: Any) -> bool:
    return not isinstance(value, str) and isinstance(value, Iterable) and all(isinstance(scope, str) for scope in value)
