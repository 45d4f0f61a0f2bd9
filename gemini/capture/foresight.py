"""Foresight: guards whose outcome is known before a run.

A test of a mask needs the mask and a few ops, not the model: these run first, on the side, and a call that goes
another way is sent to another variant before anything was done. Guards that draw random numbers in between, or
look at what modules return, are checked where they stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.capture.executor import Execution, GuardBroken, NodeFailed
from gemini.capture.forms import expr_refs
from gemini.capture.regions import RegionSwitch

if TYPE_CHECKING:
    from gemini.capture.graph import Graph
    from gemini.capture.node import Guard, Node


class Foresight:
    """The guards of a graph that can be checked first, and the nodes that takes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.guards: list[Guard] = []
        self.nodes: list[int] = []
        needed: set[int] = set()
        for guard in graph.guards:
            ancestors = self._ancestors({ref.node for ref in expr_refs(guard.expr)}) if guard.data else None
            if ancestors is not None:
                self.guards.append(guard)
                needed |= ancestors
        self.nodes = sorted(needed)

    def _ancestors(self, nodes: set[int]) -> set[int] | None:
        """All nodes these depend on; None if one of them is more than an op without effects."""
        found: set[int] = set()
        waiting = list(nodes)
        while waiting:
            index = waiting.pop()
            if index in found:
                continue
            node = self.graph.nodes[index]
            if not node.is_source and (node.kind != "op" or node.random or node.mutates or node.after):
                return None
            found.add(index)
            waiting += node.dependencies
        return found

    def broken(self, model: nn.Module, bound: dict[str, Any]) -> Guard | None:
        """The first of these guards that a call breaks; None if it breaks none."""
        execution = (_OfFirst if self.graph.rolled else Execution)(self.graph, model, bound)
        with RegionSwitch() as regions:
            for index in self.nodes:
                node = self.graph.nodes[index]
                if node.region is not None:
                    regions.to(node.region)
                try:
                    execution.step(node)
                except (NodeFailed, GuardBroken):
                    return self.guards[0]
            for guard in self.guards:
                try:
                    execution.check((guard,))
                except GuardBroken:
                    return guard
        return None


class _OfFirst(Execution):
    """A run of the first micro-batch of a batch: a rolled graph knows no other size."""

    def _source(self, node: Node) -> torch.Tensor:
        found = super()._source(node)
        if node.kind != "input":
            return found
        (meta,) = node.outputs.values()
        if meta.batch_dim is None or found.dim() != len(meta.shape):
            return found
        return found.narrow(meta.batch_dim, 0, min(meta.shape[meta.batch_dim], found.shape[meta.batch_dim]))
