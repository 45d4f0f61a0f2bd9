"""Partition: the stage of every node and the worker of every stage. Plain data with a JSON form.

Stages are in topological order: executed in order they are the model. With one stage per worker, stage and worker have
the same number; in a mixed pipeline a worker has several stages, which need not be adjacent:

    stage    0    1    2    3    4    5
    worker   0    1    0    2    1    2

Model inputs, parameters and buffers belong to no stage: every stage that reads them has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.atomic_files import read_json, write_json
from gemini.errors import PartitionError

if TYPE_CHECKING:
    from gemini.ir.graph import Graph

FORMAT = 1


@dataclass(frozen=True)
class Partition:
    """The stages of a graph and their workers."""

    model: str
    partitioner: str
    nparts: int  # workers
    stages: tuple[tuple[int, ...], ...]  # node ids, ascending
    workers: tuple[int, ...]  # of each stage
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # reported by the partitioner: optimal, gap, seconds, tries

    def __post_init__(self) -> None:
        for name in ("options", "facts"):  # the same types as after loading from a file
            object.__setattr__(self, name, _plain(getattr(self, name)))
        faults = list(self._faults())
        if faults:
            raise PartitionError("not a valid partition:\n" + "\n".join(f"  - {fault}" for fault in faults))

    def _faults(self) -> Iterator[str]:
        if len(self.stages) != len(self.workers):
            yield f"{len(self.stages)} stages, but workers for {len(self.workers)}"
        if any(worker not in range(self.nparts) for worker in self.workers):
            yield f"stages on workers {sorted(set(self.workers))} of {self.nparts}"
        empty = [at for at, nodes in enumerate(self.stages) if not nodes]
        if empty:
            yield f"stages {empty} are empty"
        seen: set[int] = set()
        for at, nodes in enumerate(self.stages):
            if seen & set(nodes):
                yield f"stage {at} repeats nodes {sorted(seen & set(nodes))[:5]} of another stage"
            if list(nodes) != sorted(set(nodes)):
                yield f"the nodes of stage {at} are not in ascending order"
            seen |= set(nodes)

    @property
    def nstages(self) -> int:
        """The number of stages, at least that of workers in use."""
        return len(self.stages)

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """The stage of each node."""
        return {node: at for at, nodes in enumerate(self.stages) for node in nodes}

    @property
    def is_mixed(self) -> bool:
        """Whether a worker has more than one stage."""
        return len(set(self.workers)) < len(self.workers)

    def validate(self, graph: Graph) -> None:
        """Raise PartitionError unless every node of the graph is in one stage and no stage reads from a later one."""
        faults = list(_graph_faults(self, graph))
        if faults:
            shown = "\n".join(f"  - {fault}" for fault in faults[:10])
            raise PartitionError(f"the partition does not fit the graph of {graph.model_name}:\n{shown}")

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(data: Any) -> Partition:
        """Build a partition from plain data."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PartitionError(f"not a partition of format {FORMAT}: {found}\n    → partition the model again")
        try:
            rest = {key: value for key, value in data.items() if key != "format"}
            rest["stages"] = tuple(tuple(nodes) for nodes in data["stages"])
            rest["workers"] = tuple(data["workers"])
            return Partition(**rest)
        except (KeyError, TypeError) as error:
            raise PartitionError(f"not a valid partition: {error!r}\n    → partition the model again") from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Partition:
        """Read a file written by `save`."""
        return Partition.from_json(read_json(path))


def _plain(value: Any) -> Any:
    """Return the value with tuples as lists."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _graph_faults(partition: Partition, graph: Graph) -> Iterator[str]:
    stage_of = partition.stage_of
    wanted = {node.id for node in graph.compute_nodes}
    missing, strange = sorted(wanted - set(stage_of)), sorted(set(stage_of) - wanted)
    if missing:
        yield f"{len(missing)} nodes are in no stage, the first is {graph.nodes[missing[0]].name}"
    if strange:
        yield f"{strange[:5]} are not compute nodes"
    for node in graph.compute_nodes:
        for source in node.dependencies:
            before, after = stage_of.get(source), stage_of.get(node.id)
            if before is not None and after is not None and before > after:
                yield f"{node.name} in stage {after} needs {graph.nodes[source].name} of the later stage {before}"
