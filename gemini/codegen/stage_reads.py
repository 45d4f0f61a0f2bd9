"""Stage reads: the values that the nodes of a stage read, and the guards that it checks.

A stage reads tensors, and numbers computed from tensors it does not receive (`x.shape[0]`). Guards that are checked
before a call is dispatched are omitted: those on sizes that the signature fixes, and those that the guards of the call
cover.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gemini.capture.attribute_writes import RETURN_WRITE
from gemini.capture.graph_guards import early_guards
from gemini.ir.def_use import refs_of_read, tensor_reads
from gemini.ir.graph import Graph
from gemini.ir.node import Guard, Node
from gemini.ir.pytree import Number, Ref, expr_refs, leaves, refs
from gemini.ir.symint import Expr
from gemini.partition.assignment import Partition


@dataclass
class Reads:
    """The nodes of one stage, and their reads: tensors, and numbers with the node id where each is first needed."""

    nodes: list[int] = field(default_factory=list)
    tensors: dict[Ref, None] = field(default_factory=dict)
    numbers: dict[Expr, int] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)

    def form(self, form: Any, position: int) -> None:
        """Add the reads of a form."""
        for leaf in leaves(form):
            if isinstance(leaf, Ref):
                self.tensors[leaf] = None
            elif isinstance(leaf, Number):
                self.expr(leaf.expr, position)

    def expr(self, expr: Any, position: int) -> None:
        """Add the reads of an expression."""
        for read in tensor_reads(expr):
            if read.op == "call":
                self.tensors.update(dict.fromkeys(refs(read.operands[1])))
                self.tensors.update(dict.fromkeys(refs(read.operands[2])))
            else:
                self.numbers[read] = min(position, self.numbers.get(read, position))


def stage_reads(graph: Graph, partition: Partition) -> list[Reads]:
    """Return the reads of every stage."""
    found = [Reads() for _ in partition.stages]
    guards = runtime_guards(graph)
    needed = needed_nodes(graph, guards)
    for stage, nodes in enumerate(partition.stages):
        found[stage].nodes = [index for index in nodes if index in needed]
        for index in found[stage].nodes:
            node = graph.nodes[index]
            found[stage].form(node.args, index)
            found[stage].form(node.kwargs, index)
    for guard in guards:
        home = _checking_stage(partition, guard, found)
        found[home].guards.append(guard)
        found[home].expr(guard.expr, guard.position)
    return found


def needed_nodes(graph: Graph, guards: list[Guard] | None = None) -> set[int]:
    """Return the nodes that must run, without those that only serve a guard checked before dispatch."""
    wanted = {ref.node for ref in refs(graph.result)}
    guards = runtime_guards(graph) if guards is None else guards
    wanted |= {ref.node for guard in guards for ref in expr_refs(guard.expr)}
    found = set()
    for node in reversed(graph.nodes):
        if node.id in wanted or not _is_pure(node):
            found.add(node.id)
            wanted |= {ref.node for ref in node.inputs()}
    return found


def _is_pure(node: Node) -> bool:
    """Return whether a node only makes tensors."""
    if node.target == RETURN_WRITE:
        return True
    if node.kind != "op" or node.mutates or node.random or not node.outputs:
        return node.is_source
    return node.target.endswith("__") or not node.target.endswith("_")  # `requires_grad_` changes a flag


def _checking_stage(partition: Partition, guard: Guard, found: list[Reads]) -> int:
    """Return the stage that checks a guard: the last that makes one of its values, else the first that reads one."""
    read = {ref for part in tensor_reads(guard.expr) for ref in refs_of_read(part)}
    made = [partition.stage_of[ref.node] for ref in read if ref.node in partition.stage_of]
    if made:
        return max(made)
    return next((stage for stage, reads in enumerate(found) if read & reads.tensors.keys()), 0)


# ── guards ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def runtime_guards(graph: Graph) -> list[Guard]:
    """Return the guards that must be checked during a run."""
    foreseen = {id(guard) for guard in early_guards(graph).guards}
    return [guard for guard in graph.guards if id(guard) not in foreseen and (guard.data or _varies(graph, guard))]


def _varies(graph: Graph, guard: Guard) -> bool:
    """Return whether a guard on sizes may have another outcome for another number of samples."""
    if graph.validity is not None and not graph.validity.batch:
        return False  # the signature fixes all sizes
    return any(_depends_on_batch(graph, read) for read in tensor_reads(guard.expr))


def _depends_on_batch(graph: Graph, read: Expr) -> bool:
    for ref in refs_of_read(read):
        meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))
        if meta is None or meta.batch_factor == 0:
            return True
        if meta.batch_dim is None:
            continue
        if read.op != "size" or read.operands[1] % len(meta.shape) == meta.batch_dim:
            return True
    return False
