"""Plan request: all inputs of a step plan except the model and the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.partition.partition_options import Options, Worker
from gemini.planner.schedule_choice import ACTION_MS, AUTO
from gemini.profiling.host_speed import HostSpeed
from gemini.profiling.measured_device import MB
from gemini.schedule.link_costs import Links, Table

if TYPE_CHECKING:
    from gemini.parallel_program.compiled_plans import CompiledPlans
    from gemini.planner.step_plan import StepPlan

_BALANCED = 0.03  # the partition search stops at stages this close to an even share
LOCAL = Links(latency=0.1, bandwidth=4e6)  # ms, bytes per ms: shared memory between two processes
# Fields that do not change which plan is best for a graph; they are no part of the key of a cached plan.
_NOT_IN_KEY = frozenset(
    (
        "cache",
        "quiet",
        "gather_reason",
        "single_micro_batch_reason",
        "earlier_plans",
        "measured_plan",
        "measure_speeds",
        "local_step_ms",
        "deadline_s",
        "program",
    )
)

Speeds = tuple[HostSpeed, Sequence[HostSpeed]]  # of this process alone, and of all workers at the same time
SpeedProbe = Callable[[], Speeds | None]


@dataclass(frozen=True)
class PlanRequest:
    """The configuration of a plan, and the properties of the call that the runtime has detected.

    The first group of fields comes from the configuration. The second is set per call by the runtime, with
    `dataclasses.replace`.
    """

    workers: int  # that a schedule sees: each runs stages
    micro_batches: int
    replicas: int = 1  # of the model, which share the workers and the micro-batches
    may_replicate: bool = False  # the planner may choose several replicas, where they share memory
    threads: int = 1  # per worker
    shards: int = 1  # of every stage: each of the `workers` is a group of as many
    grouped: bool = False  # the schedule of a file has blocks on several workers at once
    sharding_dim: int | None = None  # of all weights: 0 the reduction dimension, -1 the output dimension
    sharding_overrides: str = ""  # scope=choice, …
    partitioner: str = "exact"
    schedule: str = AUTO
    memory_limit_mb: float | None = None  # per worker
    rng: str = "exact"  # or "fast": each worker generates its own random numbers
    micro_batch_statistics: bool = False  # batch normalization in training takes statistics per micro-batch
    links: Links = LOCAL
    seed: int = 0
    cache: bool | str | Path = True
    quiet: bool = False  # log nothing about cached plans that cannot be used
    program: CompiledPlans | None = None  # plans and stages of a compiled program

    gather_reason: str = ""  # why the loss or the end of the model must see the whole batch; '': it need not
    single_micro_batch_reason: str = ""  # why the batch must stay one micro-batch; '': it may be split
    current_branch: bool = False  # plan for the branch that the current state of the generator selects
    earlier_plans: tuple[StepPlan, ...] = ()  # plans of the same model that may be reused for another input size
    measured_plan: StepPlan | None = None  # plan again, with the measured times of this plan
    local_step_ms: float = (
        0.0  # measured in this process; a planning that takes many times longer is refused; 0: plan anyway
    )
    deadline_s: float | None = None  # processor time of this process at which planning is given up
    measure_speeds: SpeedProbe | None = None  # measures the speed of the running workers

    @property
    def is_from_file(self) -> bool:
        """Whether the user supplies the schedule as a file."""
        return self.schedule.endswith(".json")

    @property
    def divides(self) -> bool:
        """Whether stages are divided over several workers."""
        return self.shards > 1 or self.grouped

    def key_facts(self) -> list[tuple[str, Any]]:
        """Return the fields that decide which plan is best, for the key of a cached plan."""
        names = sorted(field.name for field in fields(self) if field.name not in _NOT_IN_KEY)
        return [(name, getattr(self, name)) for name in names]

    def options(self, micro_batches: int, parts: float, *, on_cpu: bool = True) -> Options:
        """Return the options of partitioners and analysis for a graph that is one of `parts` equal parts of the batch.

        The optimizer state belongs to the controller; it takes memory of a worker only where both share a device.
        """
        workers = () if self.memory_limit_mb is None else (Worker(memory_mb=self.memory_limit_mb),) * self.workers
        # The analysis divides sizes by the number of micro-batches. Sizes in the graph are those of one already, so the
        # bandwidth is divided as well.
        links = Links(self.links.latency, _divide(self.links.bandwidth, parts))
        # Through shared memory only the sender copies.
        sending_ms = (
            MB / float(links.bandwidth) if self.links == LOCAL and not isinstance(links.bandwidth, tuple) else 0.0
        )
        return Options(
            workers=workers, links=links, sending_ms=sending_ms, action_ms=ACTION_MS,
            micro_batches=micro_batches, seed=self.seed, time_limit=2.0, near=_BALANCED,
            optimizer_copies=0.0 if on_cpu else Options.optimizer_copies,
        )  # fmt: skip


def _divide(table: Table, count: float) -> Table:
    if isinstance(table, tuple):
        return tuple(tuple(entry / count for entry in row) for row in table)
    return table / count
