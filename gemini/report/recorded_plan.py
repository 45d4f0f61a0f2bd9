"""Recorded plan: the plan of a model and steps measured by it, as `gemini.runtime.pipelined.plan_record` wrote them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import ArtifactError
from gemini.partition.analysis.analysis_result import Analysis, MemoryEstimate
from gemini.runtime.pipelined.plan_record import FORMAT
from gemini.runtime.run_journal import ModelJournal


@dataclass(frozen=True)
class Action:
    """One action of a worker; ms since the first action of the step."""

    worker: int
    stage: int
    mid: int
    letter: str
    begin: float
    span: float

    @property
    def end(self) -> float:
        """The end of the action."""
        return self.begin + self.span


@dataclass(frozen=True)
class MeasuredStep:
    """The actions of one step, and its duration in the controller."""

    ms: float
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class RecordedNode:
    """One node of the graph."""

    name: str
    module: str
    op: str
    stage: int
    ms: float
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RecordedShards:
    """The layouts and collectives of a plan on shards, as texts."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: str
    below: tuple[str, ...]


@dataclass(frozen=True)
class RecordedPlan:
    """A plan with measured steps, the last of which is step `step` of its model."""

    step: int
    name: str
    text: str
    micro_batches: int
    workers: int
    stages: int
    predicted_ms: float
    profiled_ms: float
    peak_mb: tuple[float, ...]
    planned: tuple[Action, ...]
    measured: tuple[MeasuredStep, ...]
    nodes: tuple[RecordedNode, ...]
    analysis: Analysis
    memory: tuple[MemoryEstimate, ...] = ()  # of each worker
    shards: RecordedShards | None = None

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """Return the stages of a worker; shards of a stage are neighbours."""
        return self.analysis.workers[worker // self.shard_count].stages

    @property
    def shard_count(self) -> int:
        """The number of workers per stage."""
        return self.workers // len(self.analysis.workers)

    @property
    def last(self) -> MeasuredStep:
        """The recorded step."""
        return self.measured[-1]


def idle_share(actions: tuple[Action, ...], workers: int) -> float:
    """Return the share of the workers' time, from the first action to the last, without an action."""
    end = max((action.end for action in actions), default=0.0)
    return 1 - sum(action.span for action in actions) / (end * workers) if end else 0.0


def read_recorded_plan(folder: Path, model: ModelJournal) -> RecordedPlan | None:
    """Return the recorded plan of a model in a run folder; None where no step ran by one. Raises ArtifactError."""
    if not model.record_file:
        return None
    path = folder / model.record_file
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"it has format {data['format']}, this version reads {FORMAT}")
        return _parse(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"cannot read {path}: {error}\n    → run the script again") from error


def _parse(data: dict[str, Any]) -> RecordedPlan:
    same = ("step", "name", "text", "micro_batches", "workers", "stages", "predicted_ms", "profiled_ms")
    return RecordedPlan(
        **{name: data[name] for name in same},
        peak_mb=tuple(data["peak_mb"]),
        planned=tuple(Action(*row) for row in data["planned"]),
        measured=tuple(MeasuredStep(one["ms"], tuple(Action(*row) for row in one["rows"])) for one in data["measured"]),
        nodes=tuple(
            RecordedNode(name, module, op, stage, ms, tuple(shape))
            for name, module, op, stage, ms, shape in data["nodes"]
        ),
        analysis=Analysis.from_json(data["analysis"]),
        memory=tuple(MemoryEstimate(**one) for one in data["memory"]),
        shards=None if data["shards"] is None else _parse_shards(data["shards"]),
    )


def _parse_shards(data: dict[str, Any]) -> RecordedShards:
    rows = tuple(tuple(row) for row in data["rows"])
    return RecordedShards(data["title"], tuple(data["head"]), rows, data["legend"], tuple(data["below"]))
