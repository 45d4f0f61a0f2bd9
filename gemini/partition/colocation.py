"""Inseparable nodes: what must share a stage for the stages together to equal the model.

A value that crosses to another stage arrives there as a copy, taken when its stage has ended. That is invisible unless
somebody writes to its memory: so whoever writes to memory stays with the node that made it. The views in between lie
on the way from one to the other, and readers from before the write are ordered before it, so these stay too. Later
readers may live elsewhere: they get the value as it is after all writes.

    x = conv(…)   makes          ┐
    y = x[0]      looks at it    │ together
    y.add_(1)     writes         ┘
    z = x * 2     reads later      anywhere

A tensor that the model or the caller holds is written where everybody who takes it is: each stage brings its own.
Likewise a module that keeps something of its runs (batch statistics, a counter) runs in one stage only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from gemini.ir.graph import Graph
from gemini.ir.interpreter import get_held
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import Ref
from gemini.profiling.node_memory import storage_key
from gemini.profiling.node_tensors import HELD, held_tensors

# Whether these return a view or a copy depends on strides, and so on the batch: they count as views.
_MAYBE_VIEWS = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous", "Flatten", "to"})


class Joined:
    """A union of groups that grow together."""

    def __init__(self, count: int) -> None:
        self.parent = list(range(count))

    def find(self, at: int) -> int:
        """The representative of a group."""
        while self.parent[at] != at:
            self.parent[at] = self.parent[self.parent[at]]
            at = self.parent[at]
        return at

    def join(self, members: Iterable[int]) -> None:
        """Make one group of all groups that the members are in."""
        roots = sorted({self.find(member) for member in members})
        for root in roots[1:]:
            self.parent[root] = roots[0]


def written_groups(graph: Graph) -> Iterator[set[int]]:
    """Groups of nodes that must not be separated."""
    memory = _Memory(graph)
    for node in graph.compute_nodes:
        for ref in node.mutates:
            group = {node.id}
            for maker in memory.makers(ref):
                group |= memory.touching[maker] if graph.nodes[maker].is_source else {maker}
            if len(group) > 1:
                yield group
    yield from _stateful(graph)


class _Memory:
    """Who makes, and who touches, the memory of values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def makers(self, ref: Ref) -> set[int]:
        """The nodes that may have made the memory of a value, views on the way included."""
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
        """Who brings along each tensor that the caller or the model holds: as an argument, or as its module.

        Who reads a view of it, or what an in-place op returned, gets that from such a node, after all writes.
        """
        found: dict[int, set[int]] = defaultdict(set)
        for node in self.graph.compute_nodes:
            for ref in {*node.inputs(), *node.mutates}:
                source = self.graph.nodes[ref.node]
                if source.is_source:
                    for maker in (source.id, *source.shares):
                        found[maker].add(node.id)
        held = {node.id: self._storage(node) for node in self.graph.nodes if node.kind in HELD}
        model = self.graph.bound_model() if held else None
        for node in self.graph.compute_nodes:
            if model is not None and node.kind in MODULES:
                own = {_storage_of(tensor) for tensor in held_tensors(self.graph, model, node)}
                for brought, storage in held.items():
                    if storage in own:
                        found[brought].add(node.id)
        return found

    def _storage(self, node: Node) -> int:
        return _storage_of(get_held(self.graph.bound_model(), node.target))


def _storage_of(tensor: Any) -> int:
    return storage_key(tensor) or id(tensor)  # sparse and other tensors have no storage


def _may_view(node: Node) -> bool:
    if node.kind == "op":
        return node.target.rpartition(".")[2] in _MAYBE_VIEWS
    return node.kind == "module" and node.cls in _MAYBE_VIEWS


def _stateful(graph: Graph) -> Iterator[set[int]]:
    """For every module that keeps something of its runs, the nodes that run it or read its buffers."""
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
            if graph.nodes[ref.node].kind in HELD:
                reads[id(get_held(model, graph.nodes[ref.node].target))].add(node.id)
    for name in changing:
        part = model.get_submodule(name) if name else model
        group = set(runs[id(part)]).union(*(reads[id(buffer)] for buffer in part.buffers(recurse=False)))
        if len(group) > 1:
            yield group
