"""Scope tree: the graph of a model folded by its modules, with the time of each stage in every module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gemini.report.recorded_plan import RecordedNode

_LISTED = 4000  # nodes; of a larger graph the tree lists modules only


@dataclass
class ScopeTree:
    """A module with its parts, modules and operations, in execution order."""

    name: str
    stage_ms: dict[int, float] = field(default_factory=dict)
    count: int = 0  # operations
    parts: list[ScopeTree | RecordedNode] = field(default_factory=list)
    _modules: dict[str, ScopeTree] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """The time of the module, forward and backward of a batch."""
        return sum(self.stage_ms.values())

    @property
    def stages(self) -> list[int]:
        """The stages that have a part of it."""
        return sorted(self.stage_ms)

    def shares(self) -> list[tuple[int, float]]:
        """Return stage and share of the module's time, for a bar."""
        total = self.ms
        return [(stage, self.stage_ms[stage] / total if total else 1 / len(self.stage_ms)) for stage in self.stages]

    def module(self, name: str) -> ScopeTree:
        """Return the part of this name, added where it is missing."""
        if name not in self._modules:
            self._modules[name] = ScopeTree(name)
            self.parts.append(self._modules[name])
        return self._modules[name]


def fold_by_scope(model: str, nodes: Iterable[RecordedNode]) -> ScopeTree:
    """Return the tree of a graph."""
    root, listed = ScopeTree(model), list(nodes)
    for node in listed:
        path = [root]
        for part in node.module.split(".") if node.module else ():
            path.append(path[-1].module(part))
        for scope in path:
            scope.count += 1
            scope.stage_ms[node.stage] = scope.stage_ms.get(node.stage, 0.0) + node.ms
        if len(listed) <= _LISTED:
            path[-1].parts.append(node)
    _join_chains(root)
    return root


def _join_chains(scope: ScopeTree) -> None:
    """Join a module whose only content is one module with it: `encoder` and `layer` become `encoder.layer`."""
    for part in scope.parts:
        if isinstance(part, ScopeTree):
            while len(part.parts) == 1 and isinstance(only := part.parts[0], ScopeTree):
                part.name, part.parts = f"{part.name}.{only.name}", only.parts
            _join_chains(part)
