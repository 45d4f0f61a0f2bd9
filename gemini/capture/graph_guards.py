"""Graph guards: the causes of branches of the model's Python, and the guards that can be checked before a run.

Three analyses of guards:

- `early_guards`: guards that need a few ops and not the model (a test of a mask). They run first, on the side, and a
  call that breaks one goes to another variant before any node has run. Guards that depend on random numbers or on
  the results of modules are checked at their position.
- `causing_inputs`: the inputs whose contents decide a branch. While these are the captured ones, so is the branch.
- `finite_check_operand`: branches that only test whether all elements are finite (`if not torch.isfinite(x).all()`).
  The outcome is the same in every healthy step, so such a branch may be a guard though it reads results of the model:
  a step in which it differs runs in the model itself. The outcome for a batch follows from those of its micro-batches.
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
    """The guards of a graph that can be checked before a run, and the nodes needed to evaluate them."""

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
        self._unpinned: dict[bool, tuple[list[Guard], list[int]]] = {}

    def _ancestors(self, nodes: set[int]) -> set[int] | None:
        """Return all nodes that these depend on; None if one has effects or uses random numbers."""
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
        """Return whether a node is an op without effects, or an opaque function of inputs that reads sample counts."""
        if node.random or node.mutates or node.changes:
            return False
        if node.kind == "op":
            return not node.after
        reads_counts = self.graph.calls.get(node.target, "").startswith(READS_SAMPLE_COUNTS)
        earlier = [self.graph.nodes[index] for index in node.after]
        return (
            node.kind == "call" and reads_counts and not node.uses and all(one.target == node.target for one in earlier)
        )

    def find_broken(self, model: nn.Module, bound: dict[str, Any]) -> Guard | None:
        """Return the first of these guards that a call breaks; None if it breaks none.

        Guards of a rolled graph are checked per micro-batch: see `find_broken_in_microbatches`.
        """
        return (
            None if self.graph.rolled else self._evaluate(Execution(self.graph, model, bound), self.guards, self.nodes)
        )

    def find_broken_in_microbatches(self, model: nn.Module, bound: dict[str, Any]) -> Guard | None:
        """Return the first guard of a rolled graph that a batch breaks, in one of its micro-batches or as a whole."""
        wholes = {id(self.graph.guards[at]) for at in self.graph.whole_batch_guards}
        found = self._evaluate(Execution(self.graph, model, bound), *self._unsettled_guards(wholes))
        for number in range(self.graph.rolled):
            found = found or self._evaluate(
                _MicrobatchExecution(self.graph, model, bound, number), *self._unsettled_guards(None)
            )
        return found

    def _unsettled_guards(self, wanted: set[int] | None) -> tuple[list[Guard], list[int]]:
        """Return the guards with these ids, or all, that pinned inputs do not settle, and the nodes they need."""
        key = wanted is None
        if key not in self._unpinned:
            pinned = set(self.graph.pins)
            guards, nodes = [], set()
            for guard in self.guards:
                read = list(expr_refs(guard.expr))
                causes = causing_inputs(self.graph.nodes, read)
                if (key or id(guard) in (wanted or ())) and (causes is None or not causes <= pinned):
                    guards.append(guard)
                    nodes |= self._ancestors({ref.node for ref in read}) or set()
            self._unpinned[key] = guards, sorted(nodes)
        return self._unpinned[key]

    def _evaluate(self, execution: Execution, guards: list[Guard], nodes: list[int]) -> Guard | None:
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
    """A run on one micro-batch of a batch."""

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
    """Return the nodes whose contents determine some values, writers of their memory included."""
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
    """Return the inputs that determine some values by ops and functions alone; None where another tensor does too."""
    causes = [nodes[index] for index in content_causes(nodes, values)]
    written = {root for node in causes for ref in node.mutates for root in memory_makers(nodes, ref.node)}
    if any(node.is_source and (node.kind != "input" or node.id in written) for node in causes):
        return None
    if not all(node.is_source or _computes(node) for node in causes):
        return None
    return {node.id for node in causes if node.kind == "input"}


def _computes(node: Node) -> bool:
    """Return whether the arguments alone determine a result: of an op, or of an opaque function without weights."""
    if node.random or node.changes:
        return False
    return node.kind == "op" or (node.kind == "call" and not node.uses)


def finite_check_operand(nodes: Sequence[Node], expr: Any, expected: Any) -> Ref | None:
    """Return the value that a branch tests for being finite, with outcome finite; None for any other branch."""
    while isinstance(expr, Expr) and expr.op in ("bool", "item") and len(expr.operands) == 1:
        expr = expr.operands[0]
    if not isinstance(expr, Ref) or not isinstance(expected, bool):
        return None
    over = nodes[expr.node]
    inputs = list(refs(over.args))
    if over.kind != "op" or len(inputs) != 1 or any(True for _ in refs(over.kwargs)):
        return None
    test = nodes[inputs[0].node]
    operands = list(refs(test.args))
    wanted = _HEALTHY.get(_name(test)) if test.kind == "op" and len(operands) == 1 else None
    return operands[0] if wanted == (_name(over), expected) else None


def _name(node: Node) -> str:
    return node.target.rpartition(".")[2]
