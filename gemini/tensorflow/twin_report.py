"""The report of a twin: what runs where, how the first step compared, or why the graph runs as the script built it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

_LOSS_LIMIT, _GRADIENT_LIMIT = 1e-5, 1e-3


@dataclass(frozen=True)
class WorkerShare:
    """The operations of the twin on one device."""

    device: str
    stage: int
    shard: int
    ops: int


@dataclass(frozen=True)
class Comparison:
    """The first step of the twin against the untouched graph; each gradient relative to its largest entry."""

    loss: float
    twin_loss: float
    gradient_error: float
    worst_gradient: str

    @property
    def loss_error(self) -> float:
        """The relative difference of the losses."""
        return abs(self.twin_loss - self.loss) / max(abs(self.loss), 1e-30)

    @property
    def fault(self) -> str:
        """What differs by more than rounding; empty where nothing does."""
        if not self.loss_error <= _LOSS_LIMIT:
            return f"the loss of the first step was {self.twin_loss:.9g}, that of the graph {self.loss:.9g}"
        if not self.gradient_error <= _GRADIENT_LIMIT:
            error = f"{self.gradient_error:.1e} of its largest entry"
            return f"the first gradient of {self.worst_gradient} differed by {error}"
        return ""


def batch_text(shapes: Iterable[tuple[int, ...]]) -> str:
    """Return the shapes of what a step takes in."""
    return ", ".join("×".join(map(str, shape)) for shape in sorted({*shapes} - {()})) or "no batch"


@dataclass(frozen=True)
class TwinReport:
    """One kind of training step: its loss and batch shape, and either its twin or the reason for none."""

    loss: str
    batch: str
    stages: int = 1
    shards: int = 1
    micro_batches: int = 1
    schedule: str = "none"
    workers: tuple[WorkerShare, ...] = ()
    all_reduces: int = 0
    gathers: int = 0
    build_seconds: float = 0.0
    comparison: Comparison | None = None
    reason: str = ""
    """Why the untouched graph runs; empty where the twin runs."""

    @property
    def runs_twin(self) -> bool:
        """Whether steps of this kind run on the twin."""
        return not self.reason

    @property
    def line(self) -> str:
        """One line for the user."""
        if self.reason:
            return f"step of {self.loss} ({self.batch}) runs on the untouched graph: {self.reason}"
        ops = " + ".join(str(worker.ops) for worker in self.workers)
        return (
            f"step of {self.loss} ({self.batch}): stages {self.stages} × shards {self.shards}, "
            f"micro-batches {self.micro_batches}, schedule {self.schedule}, operations per worker {ops}"
        )

    @property
    def comparison_line(self) -> str:
        """One line on how the first step compared with the untouched graph."""
        found = self.comparison
        if found is None:
            return f"step of {self.loss}: not compared with the untouched graph"
        return (
            f"step of {self.loss}: loss {found.twin_loss:.6g} against {found.loss:.6g} of the untouched graph, "
            f"gradients within {found.gradient_error:.1e} ({found.worst_gradient or 'all equal'})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)
