"""The problem: a profiled graph as plain numbers, which is all that partitioners see.

An *item* is one node of the graph, or several that must not be separated. Items are in an order in which values only
flow forward. A value is counted once for every worker that needs it, whatever the number of its readers there; the
time of moving it there, and its gradient back, counts for the worker that needs it.

        item 0 ──value 0──► item 1 ──value 1──► item 3
           └─────value 0──► item 2 ······order······┘        order: nothing flows, but 2 must not come after 3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gemini.partition.partition_options import Options, Worker

MB = 1 << 20
ORDER = -1  # the value of an edge along which nothing flows


@dataclass(frozen=True)
class Item:
    """Nodes that share a stage: their time, and what they hold."""

    name: str
    nodes: tuple[int, ...]  # node ids, ascending
    ms: float  # the time that is balanced, on a worker of speed 1
    forward_ms: float
    backward_ms: float
    parameters: tuple[str, ...] = ()
    saved_own_mb: float = 0.0
    saved_values: tuple[int, ...] = ()  # indices of `Problem.saved_mb`
    peak_mb: float = 0.0  # the most it takes while it runs
    pin: int | None = None  # the part it must be in


@dataclass(frozen=True)
class Edge:
    """A value that flows from one item to another."""

    source: int
    target: int
    value: int = ORDER


@dataclass(frozen=True)
class Value:
    """The size of what crosses when a value is cut: forward, and its gradient back."""

    forward_mb: float
    backward_mb: float

    @property
    def mb(self) -> float:
        """Both directions."""
        return self.forward_mb + self.backward_mb


@dataclass(frozen=True)
class Problem:
    """Items to be spread over parts.

    `parameters_mb` and `saved_mb` are the sizes of what items share: parameters by name, values kept for backward by
    index.
    """

    items: tuple[Item, ...]
    edges: tuple[Edge, ...]
    values: tuple[Value, ...]
    nparts: int
    options: Options
    parameters_mb: dict[str, float] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()
    saved_mb: tuple[float, ...] = ()

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """One worker a part."""
        return self.options.of(self.nparts)

    @cached_property
    def ideal_ms(self) -> float:
        """The time of every worker if work could be split at will."""
        return sum(item.ms for item in self.items) / self.total_speed

    @cached_property
    def total_speed(self) -> float:
        """The speed of all workers together."""
        return sum(worker.speed for worker in self.workers)

    @cached_property
    def has_memory_limits(self) -> bool:
        """Whether any worker has a memory limit."""
        return any(worker.memory_mb is not None for worker in self.workers)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The items that need each item, ascending."""
        return _adjacent(len(self.items), ((edge.source, edge.target) for edge in self.edges))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The items that each item needs, ascending."""
        return _adjacent(len(self.items), ((edge.target, edge.source) for edge in self.edges))

    @cached_property
    def readers(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(producer, readers) of every value."""
        producer: dict[int, int] = {}
        found: dict[int, set[int]] = {}
        for edge in self.edges:
            if edge.value != ORDER:
                producer[edge.value] = edge.source
                found.setdefault(edge.value, set()).add(edge.target)
        return tuple((producer[at], tuple(sorted(found[at]))) for at in range(len(self.values)))

    # ── judging ────────────────────────────────────────────────────────────────────────────────────────────────
    def loads(self, part_of: Sequence[int]) -> list[float]:
        """The time of each worker (ms), computing only, for the part of each item."""
        loads = [0.0] * self.nparts
        for item, part in zip(self.items, part_of, strict=True):
            loads[part] += item.ms / self.workers[part].speed
        return loads

    def transfer_ms(self, value: int, source: int, target: int) -> float:
        """The time to move a value from one worker to another and its gradient back, all micro-batches."""
        if source == target or self.options.links.free:
            return 0.0
        count, size = self.options.micro_batches, self.values[value]
        there = self.options.links.cost(source, target, size.forward_mb * MB / count)
        back = self.options.links.cost(target, source, size.backward_mb * MB / count) if size.backward_mb else 0.0
        return float(there + back) * count

    def transfers(self, part_of: Sequence[int]) -> list[float]:
        """The time each worker (ms) spends on values that it needs from others."""
        found = [0.0] * self.nparts
        if not self.options.links.free:
            for at, (producer, readers) in enumerate(self.readers):
                source = part_of[producer]
                for target in {part_of[reader] for reader in readers} - {source}:
                    found[target] += self.transfer_ms(at, source, target)
        return found

    def times(self, part_of: Sequence[int]) -> list[float]:
        """The time of each worker (ms): computing, and moving the values it needs."""
        return [load + moved for load, moved in zip(self.loads(part_of), self.transfers(part_of), strict=True)]

    def bottleneck(self, part_of: Sequence[int]) -> float:
        """The time of the slowest worker over the ideal; 1 is perfect."""
        return max(self.times(part_of)) / self.ideal_ms if self.ideal_ms else 1.0

    def cut_mb(self, part_of: Sequence[int]) -> float:
        """All that crosses between workers, both directions."""
        return sum(
            self.values[at].mb * len({part_of[reader] for reader in readers} - {part_of[producer]})
            for at, (producer, readers) in enumerate(self.readers)
        )

    def weights_mb(self, items: Iterable[int]) -> float:
        """Parameters and buffers of some items, with gradients and optimizer, shared ones once."""
        names = dict.fromkeys(name for at in items for name in self.items[at].parameters)
        return sum(map(self.held_mb, names))

    def held_mb(self, name: str) -> float:
        """A parameter with its gradient and optimizer, or a buffer."""
        return self.parameters_mb[name] * (2.0 + self.options.optimizer_copies if name in self.trainable else 1.0)

    def activations_mb(self, items: Iterable[int]) -> float:
        """What some items keep for backward, the whole batch, shared values once."""
        chosen = [self.items[at] for at in items]
        shared = {value for item in chosen for value in item.saved_values}
        return sum(item.saved_own_mb for item in chosen) + sum(self.saved_mb[value] for value in shared)

    def memory_mb(self, items: Sequence[int], in_flight: int) -> float:
        """What a stage of these items takes with `in_flight` micro-batches between forward and backward."""
        share = min(in_flight, self.options.micro_batches) / self.options.micro_batches
        peak = max((self.items[at].peak_mb for at in items), default=0.0) / self.options.micro_batches
        return self.weights_mb(items) + self.activations_mb(items) * share + peak

    def memories(self, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> list[float]:
        """What each worker takes (MB) with all of its stages, given in order; its parameters count once."""
        batches = self.options.micro_batches
        found = [0.0] * self.nparts
        for at, (items, worker) in enumerate(zip(stages, workers, strict=True)):
            found[worker] += self.activations_mb(items) * in_flight(at, len(stages), batches) / batches
        for worker in range(self.nparts):
            items = [item for some, owner in zip(stages, workers, strict=True) if owner == worker for item in some]
            peak = max((self.items[item].peak_mb for item in items), default=0.0)
            found[worker] += self.weights_mb(items) + peak / batches
        return found


def in_flight(stage: int, nstages: int, micro_batches: int) -> int:
    """Micro-batches between forward and backward in a stage, as 1F1B has them: the first stage holds the most."""
    return min(micro_batches, nstages - stage)


def _adjacent(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    found: list[set[int]] = [set() for _ in range(count)]
    for one, other in pairs:
        if one != other:
            found[one].add(other)
    return tuple(tuple(sorted(others)) for others in found)
