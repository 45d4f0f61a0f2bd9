"""Colocation: nodes that must share a stage for the stages to be equivalent to the model.

A value sent to another stage is copied after its stage has ended. The copy is only observable if a node writes to the
value's memory in place: so a writing node shares a stage with the node that allocated the memory. Views lie on the path
between them, and readers from before the write are ordered before it, so both join the group. Later readers may be in
any stage: they get the value after all writes.

    x = conv(…)   allocates      ┐
    y = x[0]      views          │ one stage
    y.add_(1)     writes         ┘
    z = x * 2     reads later      any stage

A model tensor or model input that is written in place is read by one stage only, since each stage has its own copy.
Likewise a module that keeps state between calls (batch statistics, a counter) runs in one stage only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from gemini.ir.graph import Graph
from gemini.ir.interpreter import find_model_tensor
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import Ref
from gemini.profiling.node_memory import storage_key
from gemini.profiling.node_tensors import MODEL_TENSORS, model_tensors

# Whether these return a view or a copy depends on strides, and so on the batch: they count as views.
_MAYBE_VIEWS = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous", "Flatten", "to"})


class DisjointSets:
    """Union-find over indices."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, at: int) -> int:
        """Return the representative of a group."""
        while self.parent[at] != at:
            self.parent[at] = self.parent[self.parent[at]]
            at = self.parent[at]
        return at

    def join(self, members: Iterable[int]) -> None:
        """Merge the groups of all members."""
        roots = sorted({self.find(member) for member in members})
        for root in roots[1:]:
            self.parent[root] = roots[0]


def find_colocated(graph: Graph) -> Iterator[set[int]]:
    """Yield groups of nodes that must share a stage."""
    memory = _MemoryOwners(graph)
    for node in graph.compute_nodes:
        for ref in node.mutates:
            group = {node.id}
            for maker in memory.makers(ref):
                group |= memory.touching[maker] if graph.nodes[maker].is_source else {maker}
            if len(group) > 1:
                yield group
    yield from _find_stateful(graph)


class _MemoryOwners:
    """The nodes that allocate, and the nodes that access, the memory of values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def makers(self, ref: Ref) -> set[int]:
        """Return the nodes that may have allocated the memory of a value, views included."""
        pending, found = [ref.node], set[int]()
        while pending:
            at = pending.pop()
            if at in found:
                continue
            found.add(at)
            node = self.graph.nodes[at]
            pending += node.shares
            if _may_view(node):
                pending += [source.node for source in node.inputs()][:1]
        return found

    @cached_property
    def touching(self) -> dict[int, set[int]]:
        """The nodes that access each model input or model tensor directly: as an argument, or as part of their module.

        Readers of a view, or of the result of an in-place op, get it from such a node after all writes.
        """
        found: dict[int, set[int]] = defaultdict(set)
        for node in self.graph.compute_nodes:
            for ref in {*node.inputs(), *node.mutates}:
                source = self.graph.nodes[ref.node]
                if source.is_source:
                    for maker in (source.id, *source.shares):
                        found[maker].add(node.id)
        held = {node.id: self._storage(node) for node in self.graph.nodes if node.kind in MODEL_TENSORS}
        model = self.graph.bound_model() if held else None
        for node in self.graph.compute_nodes:
            if model is not None and node.kind in MODULES:
                own = {_storage_of(tensor) for tensor in model_tensors(self.graph, model, node)}
                for source_id, storage in held.items():
                    if storage in own:
                        found[source_id].add(node.id)
        return found

    def _storage(self, node: Node) -> int:
        return _storage_of(find_model_tensor(self.graph.bound_model(), node.target))


def _storage_of(tensor: Any) -> int:
    return storage_key(tensor) or id(tensor)  # sparse and other tensors have no storage


def _may_view(node: Node) -> bool:
    if node.kind == "op":
        return node.target.rpartition(".")[2] in _MAYBE_VIEWS
    return node.kind == "module" and node.cls in _MAYBE_VIEWS


def _find_stateful(graph: Graph) -> Iterator[set[int]]:
    """Yield, for every module that keeps state between calls, the nodes that run it or read its buffers."""
    changing = dict.fromkeys(name for node in graph.compute_nodes for name in node.changes)
    if not changing:
        return
    model = graph.bound_model()
    runs: dict[int, set[int]] = defaultdict(set)  # module → nodes
    reads: dict[int, set[int]] = defaultdict(set)  # buffer → nodes
    for node in graph.compute_nodes:
        if node.kind in MODULES:
            for part in (model.get_submodule(node.target) if node.target else model).modules():
                runs[id(part)].add(node.id)
        for ref in node.inputs():
            if graph.nodes[ref.node].kind in MODEL_TENSORS:
                reads[id(find_model_tensor(model, graph.nodes[ref.node].target))].add(node.id)
    for name in changing:
        part = model.get_submodule(name) if name else model
        group = set(runs[id(part)]).union(*(reads[id(buffer)] for buffer in part.buffers(recurse=False)))
        if len(group) > 1:
            yield group
