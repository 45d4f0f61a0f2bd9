"""Profile: the costs of all nodes of a graph, as plain data with a JSON form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gemini.atomic_files import read_json, write_json
from gemini.errors import ProfileError
from gemini.profiling.class_measurement import ANALYTIC, MEASURED
from gemini.profiling.node_costs import NodeCost

FORMAT = 1
_LISTS = ("parameters", "saved_values", "input_values", "output_values")


@dataclass(frozen=True)
class Check:
    """The sum of node times compared with the whole step, measured alternately (ms)."""

    step_ms: float
    sum_ms: float
    noise: float
    steps: int

    @property
    def error(self) -> float:
        """Relative difference of the sum from the step."""
        return (self.sum_ms - self.step_ms) / self.step_ms if self.step_ms else 0.0

    def __str__(self) -> str:
        return (
            f"sum of nodes {self.sum_ms:.1f} ms, whole step {self.step_ms:.1f} ms ±{self.noise:.1%}: {self.error:+.1%}"
        )


@dataclass(frozen=True)
class Profile:
    """The costs of all compute nodes of a graph, in execution order.

    `limit` is what bounds a step: `device`, or `host` where a GPU waits for the calling thread; node times are of that
    kind. `check` is None where no whole step was run, with the reason in `unchecked`.
    """

    model: str
    device: str
    mode: str  # measured or analytic
    nodes: tuple[NodeCost, ...]
    parameters_mb: dict[str, float]  # parameters and buffers by name, tied ones once
    values_mb: tuple[float, ...]  # the memory of the graph's values; views share an entry
    limit: str = "device"
    check: Check | None = None
    unchecked: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise ProfileError("not a valid profile:\n" + "\n".join(f"  - {fault}" for fault in faults))

    # ── totals ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[NodeCost]:
        return iter(self.nodes)

    def __getitem__(self, key: int | str) -> NodeCost:
        """Return the cost of a node, by its id or name in the graph."""
        found = [node for node in self.nodes if key in (node.id, node.name)]
        if not found:
            raise ProfileError(f"the profile of {self.model} has no node {key!r}")
        return found[0]

    @property
    def forward_ms(self) -> float:
        """The forward time of all nodes."""
        return sum(node.forward_ms for node in self.nodes)

    @property
    def backward_ms(self) -> float:
        """The backward time of all nodes."""
        return sum(node.backward_ms for node in self.nodes)

    @property
    def noise(self) -> float:
        """The relative noise of node times, weighted by time."""
        total = self.forward_ms + self.backward_ms
        return sum(node.ms * node.noise for node in self.nodes) / total if total else 0.0

    def parameter_mb(self, nodes: Iterable[NodeCost] | None = None) -> float:
        """Return the MB of parameters and buffers of some nodes (default all), shared ones once."""
        names = {name for node in (self.nodes if nodes is None else nodes) for name in node.parameters}
        return sum(self.parameters_mb[name] for name in names)

    def saved_mb(self, nodes: Iterable[NodeCost] | None = None) -> float:
        """Return the MB that some nodes (default all) save for backward, shared values once."""
        chosen = list(self.nodes if nodes is None else nodes)
        shared = {value for node in chosen for value in node.saved_values}
        return sum(node.saved_own_mb for node in chosen) + sum(self.values_mb[value] for value in shared)

    def with_recomputation(self) -> Profile:
        """Return the profile with every node recomputed in backward."""
        return replace(self, nodes=tuple(node.with_recomputation() for node in self.nodes), check=None,
                       unchecked="derived for recomputation")  # fmt: skip

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(data: Any) -> Profile:
        """Build a profile from plain data; all faults are reported at once."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ProfileError(f"not a profile of format {FORMAT}: {found}\n    → profile the model again")
        try:
            nodes = tuple(NodeCost(**{**node, **_tuples(node)}) for node in data["nodes"])
            check = None if data["check"] is None else Check(**data["check"])
            rest = {f.name: data[f.name] for f in fields(Profile) if f.name not in ("nodes", "check")}
            rest["values_mb"], rest["notes"] = tuple(rest["values_mb"]), tuple(rest["notes"])
            return Profile(nodes=nodes, check=check, **rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise ProfileError(f"not a valid profile: {error!r}\n    → profile the model again") from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a file written by `save`."""
        return Profile.from_json(read_json(path))


def _tuples(node: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(node[name]) for name in _LISTS if name in node}


def _faults(profile: Profile) -> Iterator[str]:
    if profile.mode not in (MEASURED, ANALYTIC):
        yield f"mode {profile.mode!r}; expected {MEASURED} or {ANALYTIC}"
    if profile.limit not in ("device", "host"):
        yield f"limit {profile.limit!r}; expected device or host"
    for name, size in (*profile.parameters_mb.items(), *enumerate(profile.values_mb)):
        if not _is_amount(size):
            yield f"{name} has size {size!r}"
    for node in profile.nodes:
        for field in fields(node):
            value = getattr(node, field.name)
            if field.type in ("float", "int") and not _is_amount(value):
                yield f"{node.name}: {field.name} is {value!r}"
        unknown = [name for name in node.parameters if name not in profile.parameters_mb]
        if unknown:
            yield f"{node.name}: no size for parameter {unknown[0]}"
        wrong = [
            v
            for v in (*node.saved_values, *node.input_values, *node.output_values)
            if v not in range(len(profile.values_mb))
        ]
        if wrong:
            yield f"{node.name}: no size for value {wrong[0]}"
    if len({node.id for node in profile.nodes}) != len(profile.nodes):
        yield "two entries for one node"


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
