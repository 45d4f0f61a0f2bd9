"""Stage scopes: name the contents of a stage by modules of the model.

The nodes of a stage form runs in execution order. A run is named by its first and last module, each the outermost
module that is entirely in the stage:

    bert.embeddings … encoder.layer.11.attention

Nodes of negligible time (a mask size computed in another stage, a transpose moved to its reader) interrupt neither a
run nor a module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.partition.assignment import Partition

WHOLE = "the whole model"
_SHOWN = 2  # named runs per stage
_NOTHING = 0.02  # share of the weight of a stage or module that is negligible


def stage_scopes(graph: Graph, partition: Partition, weight: Mapping[int, float]) -> tuple[str, ...]:
    """Return the name of each stage, from its heaviest runs by the `weight` of nodes."""
    if partition.nstages == 1:
        return (WHOLE,)
    return _StageNamer(graph, partition, weight).names()


class _StageNamer:
    def __init__(self, graph: Graph, partition: Partition, weight: Mapping[int, float]) -> None:
        self.graph, self.partition = graph, partition
        self.order = [node.id for node in graph.compute_nodes]
        least = sum(weight.values()) / len(self.order) * 1e-6 or 1.0  # so that nodes without weight count, too
        self.weight = {node: weight[node] + least for node in self.order}
        self.share: dict[str, dict[int, float]] = defaultdict(
            lambda: defaultdict(float)
        )  # weight of each stage in a scope
        for node in graph.compute_nodes:
            for scope in _scopes(node):
                self.share[scope][partition.stage_of[node.id]] += self.weight[node.id]

    def names(self) -> tuple[str, ...]:
        return tuple(self._name(stage) for stage in range(self.partition.nstages))

    def _name(self, stage: int) -> str:
        total = sum(self.weight[node] for node in self.partition.stages[stage])
        runs = self._runs(stage, total * _NOTHING)
        heavy = [run for run in runs if self._sum(run) > total * _NOTHING] or runs
        shown = sorted(sorted(heavy, key=self._sum, reverse=True)[:_SHOWN])
        texts = [span_text(self._outermost(run[0], stage), self._outermost(run[-1], stage)) for run in shown]
        hidden = len(heavy) - len(shown)
        return ", ".join(dict.fromkeys(texts)) + (f" and {hidden} more" if hidden else "")

    def _runs(self, stage: int, nothing: float) -> list[list[int]]:
        """Return runs of the stage's nodes, joined where the nodes between them are negligible."""
        runs: list[list[int]] = []
        between = 0.0
        for node in self.order:
            if self.partition.stage_of[node] != stage:
                between += self.weight[node]
            elif runs and between <= nothing:
                runs[-1].append(node)
                between = 0.0
            else:
                runs.append([node])
                between = 0.0
        return runs

    def _sum(self, run: list[int]) -> float:
        return sum(self.weight[node] for node in run)

    def _outermost(self, node: int, stage: int) -> str:
        """Return the outermost module of a node that lies in the stage, or the node itself."""
        found = self.graph.nodes[node]
        return next((scope for scope in _scopes(found) if self._is_in(scope, stage)), found.name)

    def _is_in(self, scope: str, stage: int) -> bool:
        share = self.share[scope]
        return share[stage] >= (1 - _NOTHING) * sum(share.values())


def _scopes(node: Node) -> list[str]:
    return [scope for scope in node.scope if scope]


def span_text(first: str, last: str) -> str:
    """Format a range of names without repeating their common prefix."""
    if first == last:
        return first
    one, other = first.split("."), last.split(".")
    shared = 0
    while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
        shared += 1
    if shared and other[shared].isdigit():
        shared -= 1  # keep the name before a number: layer.11, not 11
    return f"{first} … {'.'.join(other[shared:])}"
