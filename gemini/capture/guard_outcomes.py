"""Foresight: guards whose outcome is known before a run.

A test of a mask needs the mask and a few ops, not the model: these run first, on the side, and a call that goes
another way is sent to another variant before anything was done. Guards that draw random numbers in between, or
look at what modules return, are checked where they stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.capture.input_pins import inputs_of
from gemini.capture.scaling_reads import REASON
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.ir.pytree import expr_refs

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import Guard, Node


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
        self._open: dict[bool, tuple[list[Guard], list[int]]] = {}

    def _ancestors(self, nodes: set[int]) -> set[int] | None:
        """All nodes these depend on; None if one of them does more than compute."""
        found: set[int] = set()
        waiting = list(nodes)
        while waiting:
            index = waiting.pop()
            if index in found:
                continue
            node = self.graph.nodes[index]
            if not node.is_source and not self._only_computes(node):
                return None
            found.add(index)
            waiting += node.dependencies
        return found

    def _only_computes(self, node: Node) -> bool:
        """Whether a node is an op without effects, or a function of inputs that is kept whole for what it reads."""
        if node.random or node.mutates or node.changes:
            return False
        if node.kind == "op":
            return not node.after
        kept = self.graph.calls.get(node.target, "").startswith(REASON)
        others = [self.graph.nodes[index] for index in node.after]
        return node.kind == "call" and kept and not node.uses and all(one.target == node.target for one in others)

    def broken(self, model: nn.Module, bound: dict[str, Any]) -> Guard | None:
        """The first of these guards that a call breaks; None if it breaks none.

        Those of a rolled graph are looked at in its micro-batches, of which a call has several: see `broken_in_pieces`.
        """
        return None if self.graph.rolled else self._broken(Execution(self.graph, model, bound), self.guards, self.nodes)

    def broken_in_pieces(self, model: nn.Module, bound: dict[str, Any]) -> Guard | None:
        """The first guard of a rolled graph that a batch breaks, in one of its micro-batches or, if need be, as one."""
        wholes = {id(self.graph.guards[at]) for at in self.graph.wholes}
        found = self._broken(Execution(self.graph, model, bound), *self._needed(wholes))
        for number in range(self.graph.rolled):
            found = found or self._broken(_OfPiece(self.graph, model, bound, number), *self._needed(None))
        return found

    def _needed(self, wanted: set[int] | None) -> tuple[list[Guard], list[int]]:
        """Guards of these identities, or all, and the nodes they take: not where all they depend on is pinned."""
        key = wanted is None
        if key not in self._open:
            pinned = set(self.graph.pins)
            guards, nodes = [], set()
            for guard in self.guards:
                refs = list(expr_refs(guard.expr))
                causes = inputs_of(self.graph.nodes, refs)
                if (key or id(guard) in (wanted or ())) and (causes is None or not causes <= pinned):
                    guards.append(guard)
                    nodes |= self._ancestors({ref.node for ref in refs}) or set()
            self._open[key] = guards, sorted(nodes)
        return self._open[key]

    def _broken(self, execution: Execution, guards: list[Guard], nodes: list[int]) -> Guard | None:
        with RegionSwitch() as regions:
            for index in nodes:
                node = self.graph.nodes[index]
                if node.region is not None:
                    regions.to(node.region)
                try:
                    execution.step(node)
                except (NodeFailed, GuardBroken):
                    return guards[0]
            for guard in guards:
                try:
                    execution.check((guard,))
                except GuardBroken:
                    return guard
        return None


class _OfPiece(Execution):
    """A run of one micro-batch of a batch."""

    def __init__(self, graph: Graph, model: nn.Module, bound: dict[str, Any], number: int) -> None:
        super().__init__(graph, model, bound)
        self.number = number

    def _source(self, node: Node) -> torch.Tensor:
        found = super()._source(node)
        if node.kind != "input":
            return found
        (meta,) = node.outputs.values()
        if meta.batch_dim is None:
            return found
        rows = meta.shape[meta.batch_dim]
        return found.narrow(meta.batch_dim, self.number * rows, rows)
