"""Graph guards: what the branches of the model's Python depend on, and which of them can be checked before a run.

Three analyses of guards:

- `early_guards`: guards that need a few ops and not the model (a test of a mask). They run first, on the side, and a
  call that breaks one goes to another variant before anything has run. Guards that follow from random numbers or from
  the results of modules are checked at their position.
- `causing_inputs`: the inputs whose contents decide a branch. While these are the captured ones, so is the branch.
- `finite_check_operand`: branches that only test whether all elements of a value are finite (`if not torch.isfinite(x).all()`).
  The answer is the same in every healthy step, so such a branch may be a guard though it reads results of the model:
  a step in which it differs runs in the model itself. The answer for a batch follows from those for its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.capture.concretize import data_refs
from gemini.capture.cse import memory_makers
from gemini.capture.scaling_reads import READS_SAMPLE_COUNTS
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.ir.node import Node
from gemini.ir.pytree import Ref, expr_refs, refs
from gemini.ir.symint import Expr

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import Guard

_HEALTHY = {"isfinite": ("all", True), "isinf": ("any", False), "isnan": ("any", False)}


class EarlyGuards:
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
        kept = self.graph.calls.get(node.target, "").startswith(READS_SAMPLE_COUNTS)
        others = [self.graph.nodes[index] for index in node.after]
        return node.kind == "call" and kept and not node.uses and all(one.target == node.target for one in others)

    def broken(self, model: nn.Module, bound: dict[str, Any]) -> Guard | None:
        """The first of these guards that a call breaks; None if it breaks none.

        Those of a rolled graph are looked at in its micro-batches, of which a call has several: see `broken_in_pieces`.
        """
        return None if self.graph.rolled else self._broken(Execution(self.graph, model, bound), self.guards, self.nodes)

    def find_broken_in_microbatches(self, model: nn.Module, bound: dict[str, Any]) -> Guard | None:
        """The first guard of a rolled graph that a batch breaks, in one of its micro-batches or, if need be, as one."""
        wholes = {id(self.graph.guards[at]) for at in self.graph.whole_batch_guards}
        found = self._broken(Execution(self.graph, model, bound), *self._needed(wholes))
        for number in range(self.graph.rolled):
            found = found or self._broken(_MicrobatchExecution(self.graph, model, bound, number), *self._needed(None))
        return found

    def _needed(self, wanted: set[int] | None) -> tuple[list[Guard], list[int]]:
        """Guards of these identities, or all, and the nodes they take: not where all they depend on is pinned."""
        key = wanted is None
        if key not in self._open:
            pinned = set(self.graph.pins)
            guards, nodes = [], set()
            for guard in self.guards:
                read = list(expr_refs(guard.expr))
                causes = causing_inputs(self.graph.nodes, read)
                if (key or id(guard) in (wanted or ())) and (causes is None or not causes <= pinned):
                    guards.append(guard)
                    nodes |= self._ancestors({ref.node for ref in read}) or set()
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


class _MicrobatchExecution(Execution):
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


def early_guards(graph: Graph) -> EarlyGuards:
    """Return the guards on contents of a graph that can be checked before a run."""
    return graph.derived(EarlyGuards)


def content_causes(nodes: Sequence[Node], values: Iterable[Ref]) -> set[int]:
    """The nodes whose contents some values follow from, those that wrote to them included."""
    writers: dict[int, set[int]] = {}
    for node in nodes:
        for ref in node.mutates:
            for root in memory_makers(nodes, ref.node):
                writers.setdefault(root, set()).add(node.id)
    found: set[int] = set()
    waiting = [ref.node for ref in values]
    while waiting:
        node = nodes[waiting.pop()]
        if node.id not in found:
            found.add(node.id)
            waiting += [ref.node for form in (node.args, node.kwargs) for ref in data_refs(form, {})]
            waiting += [writer for root in memory_makers(nodes, node.id) for writer in writers.get(root, ())]
    return found


def causing_inputs(nodes: Sequence[Node], values: Iterable[Ref]) -> set[int] | None:
    """The inputs that some values follow from, by ops and functions alone; None where more is needed: a buffer, say."""
    causes = [nodes[index] for index in content_causes(nodes, values)]
    written = {root for node in causes for ref in node.mutates for root in memory_makers(nodes, ref.node)}
    if any(node.is_source and (node.kind != "input" or node.id in written) for node in causes):
        return None
    if not all(node.is_source or _computes(node) for node in causes):
        return None
    return {node.id for node in causes if node.kind == "input"}


def _computes(node: Node) -> bool:
    """Whether a node makes its result of its arguments alone: an op, or a function kept whole that takes no weights."""
    if node.random or node.changes:
        return False
    return node.kind == "op" or (node.kind == "call" and not node.uses)


def finite_check_operand(nodes: Sequence[Node], expr: Any, expected: Any) -> Ref | None:
    """The value of which a branch asks whether it is finite, and finds that it is; None for any other branch."""
    while isinstance(expr, Expr) and expr.op in ("bool", "item") and len(expr.operands) == 1:
        expr = expr.operands[0]
    if not isinstance(expr, Ref) or not isinstance(expected, bool):
        return None
    over = nodes[expr.node]
    given = list(refs(over.args))
    if over.kind != "op" or len(given) != 1 or any(True for _ in refs(over.kwargs)):
        return None
    asked = nodes[given[0].node]
    operands = list(refs(asked.args))
    wanted = _HEALTHY.get(_name(asked)) if asked.kind == "op" and len(operands) == 1 else None
    return operands[0] if wanted == (_name(over), expected) else None


def _name(node: Node) -> str:
    return node.target.rpartition(".")[2]
