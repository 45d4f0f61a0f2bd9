"""Analysis: time, memory and traffic of a partition by stage and by worker, and its predicted speed-up.

Plain data with a JSON form, a table and a picture. Times are for the whole batch on the worker that runs the stage;
memory is the peak of a step under the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.atomic_files import read_json, write_json
from gemini.errors import PartitionError
from gemini.partition.traffic import StageTransfer

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.schedule.schedplan import SchedPlan

FORMAT = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a stage or a worker (MB)."""

    weights_mb: float  # parameters and buffers
    gradients_mb: float
    optimizer_mb: float
    activations_mb: float  # saved for backward, of all micro-batches in flight
    working_mb: float  # temporary, while a node runs
    transfers_mb: float = 0.0  # in flight to and from other workers, where known
    libraries_mb: float = 0.0  # caches of libraries and heap fragmentation, where known

    @property
    def total_mb(self) -> float:
        """The sum of all parts."""
        state = self.weights_mb + self.gradients_mb + self.optimizer_mb
        return state + self.activations_mb + self.working_mb + self.transfers_mb + self.libraries_mb


@dataclass(frozen=True)
class StageAnalysis:
    """One stage. `in_mb` … `sent_back_mb` count traffic with other workers, which `Analysis.flows` lists."""

    stage: int
    worker: int
    scopes: str
    nodes: tuple[int, ...]
    forward_ms: float
    backward_ms: float
    memory: MemoryEstimate
    depth: int  # micro-batches between forward and backward
    parameters: int  # elements
    parameters_mb: float
    shared: tuple[str, ...]  # parameters that other stages also use
    in_mb: float  # forward, from other stages
    out_mb: float
    returned_mb: float  # gradients, from stages that read its values
    sent_back_mb: float
    input_mb: float  # from the caller
    result_mb: float  # to the caller
    hops: int  # worker changes on the longest path to the stage

    @property
    def ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class WorkerAnalysis:
    """One worker with all its stages."""

    worker: int
    stages: tuple[int, ...]
    speed: float
    forward_ms: float
    backward_ms: float
    load_ms: float  # the balanced time: see `Options.weight`
    transfer_ms: float  # receiving the values it reads, and returning gradients
    idle: float  # share of the step
    memory: MemoryEstimate
    limit_mb: float | None

    @property
    def busy_ms(self) -> float:
        """Compute and transfer time."""
        return self.load_ms + self.transfer_ms

    @property
    def fits(self) -> bool:
        """Whether memory is within the limit."""
        return self.limit_mb is None or self.memory.total_mb <= self.limit_mb * (1 + 1e-9)


@dataclass(frozen=True)
class Analysis:
    """A partition evaluated on a profile, under a schedule."""

    model: str
    partitioner: str
    device: str
    nparts: int
    stages: tuple[StageAnalysis, ...]
    workers: tuple[WorkerAnalysis, ...]
    flows: tuple[StageTransfer, ...]  # between each pair of stages
    ideal_ms: float  # of every worker, if work were divisible
    single_ms: float  # predicted step on the fastest worker alone
    step_ms: float  # predicted step on all workers
    schedule: str
    micro_batches: int
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # reported by the partitioner
    graph: Graph | None = field(default=None, repr=False, compare=False)  # for pictures; not in files
    plan: SchedPlan | None = field(default=None, repr=False, compare=False)  # the simulated schedule; not in files

    # ── totals ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def balance(self) -> float:
        """The time of the slowest worker relative to the ideal; 1 is perfect."""
        return max(worker.busy_ms for worker in self.workers) / self.ideal_ms if self.ideal_ms else 1.0

    @property
    def cut_mb(self) -> float:
        """MB sent between workers per step, gradients included."""
        return sum(transfer.mb for transfer in self.flows)

    @property
    def hops(self) -> int:
        """Worker changes on the longest path through the model."""
        return max(stage.hops for stage in self.stages)

    @property
    def speedup(self) -> float:
        """The step time on the fastest worker alone, relative to the predicted step."""
        return self.single_ms / self.step_ms if self.step_ms else 1.0

    @property
    def bubble(self) -> float:
        """The idle share of all workers."""
        return sum(worker.idle for worker in self.workers) / len(self.workers)

    @property
    def memory_mb(self) -> float:
        """Peak memory of the worker that uses most."""
        return max(worker.memory.total_mb for worker in self.workers)

    @property
    def fits(self) -> bool:
        """Whether all workers are within their limits."""
        return all(worker.fits for worker in self.workers)

    def neighbours(self, stage: int) -> tuple[StageTransfer, ...]:
        """Return the transfers into and out of a stage."""
        return tuple(transfer for transfer in self.flows if stage in (transfer.source, transfer.target))

    # ── presentation ─────────────────────────────────────────────────────────────────────────────────────────────────
    def table(self) -> str:
        """Return a table of stages (and of workers, where they differ) with totals; coloured on a terminal."""
        from gemini.partition.analysis.analysis_table import analysis_text

        return analysis_text(self)

    def __str__(self) -> str:
        return self.table()

    def draw(self, path: str | Path, graph: Graph | None = None, fold: int | None = None) -> list[Path]:
        """Write bar charts to `path` and, where the graph is known, the coloured graph beside it; return the files."""
        from gemini.partition.analysis.analysis_picture import draw_analysis

        return draw_analysis(self, Path(path), graph or self.graph, fold)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def to_json(self) -> dict[str, Any]:
        """Return plain data, derived totals included."""
        own = {name: getattr(self, name) for name in _PLAIN}
        derived = {name: getattr(self, name) for name in _DERIVED}
        parts = {name: [asdict(part) for part in getattr(self, name)] for name in ("stages", "workers", "flows")}
        return {"format": FORMAT, **own, "notes": list(self.notes), **derived, **parts}

    @staticmethod
    def from_json(data: Any) -> Analysis:
        """Build an analysis from plain data."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PartitionError(f"not an analysis of format {FORMAT}: {found}\n    → analyse the partition again")
        try:
            return Analysis(
                stages=tuple(StageAnalysis(**_parse_part(stage, ("nodes", "shared"))) for stage in data["stages"]),
                workers=tuple(WorkerAnalysis(**_parse_part(worker, ("stages",))) for worker in data["workers"]),
                flows=tuple(StageTransfer(**transfer) for transfer in data["flows"]),
                notes=tuple(data["notes"]),
                **{name: data[name] for name in _PLAIN},
            )
        except (KeyError, TypeError) as error:
            raise PartitionError(f"not a valid analysis: {error!r}\n    → analyse the partition again") from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Analysis:
        """Read a file written by `save`."""
        return Analysis.from_json(read_json(path))


_PLAIN = (
    "model", "partitioner", "device", "nparts", "ideal_ms", "single_ms", "step_ms", "schedule", "micro_batches",
    "facts",
)  # fmt: skip
_DERIVED = ("balance", "speedup", "bubble", "cut_mb", "hops", "memory_mb", "fits")


def _parse_part(data: dict[str, Any], lists: Iterable[str]) -> dict[str, Any]:
    return {**data, **{name: tuple(data[name]) for name in lists}, "memory": MemoryEstimate(**data["memory"])}
