"""A wish: what a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemini.partition.partition_options import Options, Worker
from gemini.planner.schedule_choice import ACTION_MS, AUTO
from gemini.profiling.measured_device import MB
from gemini.schedule.link_costs import Links, Table

_NEAR = 0.03  # stages so close to an even share are not searched on
LOCAL = Links(latency=0.1, bandwidth=4e6)  # ms, bytes a ms: shared memory between two processes


@dataclass(frozen=True)
class Wish:
    """Workers, micro-batches, and all that a user may ask for beside them."""

    workers: int
    micro_batches: int
    threads: int = 1  # of a worker
    partitioner: str = "exact"
    schedule: str = AUTO
    memory_mb: float | None = None  # of a worker
    rng: str = "exact"  # or "fast": each worker draws numbers of its own
    own_statistics: bool = False  # of micro-batches, for batch normalization in training
    links: Links = LOCAL
    seed: int = 0
    cache: bool | str | Path = True
    quiet: bool = False  # not a word about kept plans that cannot be used

    def options(self, micro_batches: int, pieces: float, *, on_cpu: bool = True) -> Options:
        """What partitioners and analysis are told; the graph is that of one of so many pieces.

        The state of an optimizer is the program's, and takes memory of a worker only where both have one device.
        """
        workers = () if self.memory_mb is None else (Worker(memory_mb=self.memory_mb),) * self.workers
        # Sizes are divided by the number of micro-batches. Where they are those of one, so is the bandwidth.
        links = Links(self.links.latency, _divided(self.links.bandwidth, pieces))
        # In memory that they share, it is the sender who copies; then the other one sees it.
        sending_ms = (
            MB / float(links.bandwidth) if self.links is LOCAL and not isinstance(links.bandwidth, tuple) else 0.0
        )
        return Options(
            workers=workers, links=links, sending_ms=sending_ms, action_ms=ACTION_MS,
            micro_batches=micro_batches, seed=self.seed, time_limit=2.0, near=_NEAR,
            optimizer_copies=0.0 if on_cpu else Options.optimizer_copies,
        )  # fmt: skip


def _divided(table: Table, count: float) -> Table:
    if isinstance(table, tuple):
        return tuple(tuple(entry / count for entry in row) for row in table)
    return table / count
