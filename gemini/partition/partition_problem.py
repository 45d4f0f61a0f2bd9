"""Partition problem: a profiled graph as plain numbers, the only input of partitioners.

An *item* is one graph node, or several nodes that must share a stage. Items are in topological order. A value is sent
once to every worker that reads it, whatever the number of its readers on that worker; the time of the transfer, and of
its gradient back, counts for the reading worker.

        item 0 ──value 0──► item 1 ──value 1──► item 3
           └─────value 0──► item 2 ······order······┘        order: no value is sent, but 2 must not run after 3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gemini.partition.partition_options import Options, Worker

MB = 1 << 20
ORDER = -1  # the value of an edge that only orders its items


@dataclass(frozen=True)
class Item:
    """Nodes that share a stage, with their time and memory."""

    name: str
    nodes: tuple[int, ...]  # node ids, ascending
    ms: float  # the balanced time, on a worker of speed 1
    forward_ms: float
    backward_ms: float
    parameters: tuple[str, ...] = ()
    saved_own_mb: float = 0.0
    saved_values: tuple[int, ...] = ()  # indices of `Problem.saved_mb`
    peak_mb: float = 0.0  # peak working memory while it runs
    pin: int | None = None  # the part that it is assigned to by the user
    scope: tuple[str, ...] = ()  # the modules around its first node, outermost first


@dataclass(frozen=True)
class Edge:
    """A dependency between two items, and the value it carries."""

    source: int
    target: int
    value: int = ORDER


@dataclass(frozen=True)
class Value:
    """The bytes transferred when a value is cut: the value itself, and its gradient back."""

    forward_mb: float
    backward_mb: float

    @property
    def mb(self) -> float:
        """Size of the value and its gradient."""
        return self.forward_mb + self.backward_mb


@dataclass(frozen=True)
class Problem:
    """Items to distribute over `nparts` workers.

    `parameters_mb` and `saved_mb` are sizes that items share: parameters by name, values saved for backward by index.
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
        """One worker per part."""
        return self.options.workers_for(self.nparts)

    @cached_property
    def ideal_ms(self) -> float:
        """The time of every worker if work were divisible."""
        return sum(item.ms for item in self.items) / self.total_speed

    @cached_property
    def total_speed(self) -> float:
        """The sum of all workers' speeds."""
        return sum(worker.speed for worker in self.workers)

    @cached_property
    def has_memory_limits(self) -> bool:
        """Whether any worker has a memory limit."""
        return any(worker.memory_mb is not None for worker in self.workers)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """The direct successors of each item, ascending."""
        return _adjacent(len(self.items), ((edge.source, edge.target) for edge in self.edges))

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The direct predecessors of each item, ascending."""
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

    # ── cost of an assignment ────────────────────────────────────────────────────────────────────────────────────────
    def loads(self, part_of: Sequence[int]) -> list[float]:
        """Return each worker's compute time (ms) if item i is in part `part_of[i]`."""
        loads = [0.0] * self.nparts
        for item, part in zip(self.items, part_of, strict=True):
            loads[part] += item.ms / self.workers[part].speed
        return loads

    def transfer_ms(self, value: int, source: int, target: int) -> float:
        """Return the time to send a value between two workers and its gradient back, for all micro-batches.

        Where the sender copies (`sending_ms`), that is all: a worker does other work while values are on their way.
        """
        if source == target or self.options.links.free:
            return 0.0
        count, size = self.options.micro_batches, self.values[value]
        if self.options.sending_ms:
            return (size.forward_mb + size.backward_mb) * self.options.sending_ms
        forward = self.options.links.cost(source, target, size.forward_mb * MB / count)
        backward = self.options.links.cost(target, source, size.backward_mb * MB / count) if size.backward_mb else 0.0
        return float(forward + backward) * count

    def transfer_times(self, part_of: Sequence[int]) -> list[float]:
        """Return each worker's time (ms) for receiving the values it reads from other workers."""
        found = [0.0] * self.nparts
        if not self.options.links.free:
            for at, (producer, readers) in enumerate(self.readers):
                source = part_of[producer]
                for target in {part_of[reader] for reader in readers} - {source}:
                    found[target] += self.transfer_ms(at, source, target)
        return found

    def times(self, part_of: Sequence[int]) -> list[float]:
        """Return each worker's time (ms): compute and transfers."""
        return [load + moved for load, moved in zip(self.loads(part_of), self.transfer_times(part_of), strict=True)]

    def bottleneck(self, part_of: Sequence[int]) -> float:
        """Return the time of the slowest worker relative to the ideal; 1 is perfect balance."""
        return max(self.times(part_of)) / self.ideal_ms if self.ideal_ms else 1.0

    def cut_mb(self, part_of: Sequence[int]) -> float:
        """Return the MB sent between workers, gradients included."""
        return sum(
            self.values[at].mb * len({part_of[reader] for reader in readers} - {part_of[producer]})
            for at, (producer, readers) in enumerate(self.readers)
        )

    def weights_mb(self, items: Iterable[int]) -> float:
        """Return the MB of the items' parameters and buffers, with gradients and optimizer state, shared ones once."""
        names = dict.fromkeys(name for at in items for name in self.items[at].parameters)
        return sum(map(self.parameter_state_mb, names))

    def parameter_state_mb(self, name: str) -> float:
        """Return the MB of a parameter with its gradient and optimizer state, or of a buffer."""
        return self.parameters_mb[name] * (2.0 + self.options.optimizer_copies if name in self.trainable else 1.0)

    def activations_mb(self, items: Iterable[int]) -> float:
        """Return the MB that items save for backward for the whole batch, shared values once."""
        chosen = [self.items[at] for at in items]
        shared = {value for item in chosen for value in item.saved_values}
        return sum(item.saved_own_mb for item in chosen) + sum(self.saved_mb[value] for value in shared)

    def memory_mb(self, items: Sequence[int], in_flight: int) -> float:
        """Return the MB of a stage of these items with `in_flight` micro-batches between forward and backward."""
        share = min(in_flight, self.options.micro_batches) / self.options.micro_batches
        peak = max((self.items[at].peak_mb for at in items), default=0.0) / self.options.micro_batches
        return self.weights_mb(items) + self.activations_mb(items) * share + peak

    def worker_memory_mb(self, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> list[float]:
        """Return each worker's MB for all its stages, listed in order; its parameters count once."""
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
    """Return the micro-batches between forward and backward of a stage under 1F1B; the first stage has the most."""
    return min(micro_batches, nstages - stage)


def _adjacent(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    found: list[set[int]] = [set() for _ in range(count)]
    for one, other in pairs:
        if one != other:
            found[one].add(other)
    return tuple(tuple(sorted(neighbours)) for neighbours in found)
