"""Inseparable nodes: what must share a stage for the stages together to equal the model.

A value that crosses to another stage arrives there as a copy. That is invisible unless somebody writes to its memory:
so the nodes that make a piece of memory, look at it (views) and write to it stay together. Later readers may live
elsewhere: they get the value as it is after all writes, and readers that come before a write are ordered before it.

    y = x[0]      looks at x     ┐
    y.add_(1)     writes         ┘ with the node that made x
    z = x * 2     reads later      anywhere

Tensors that the model or the caller holds are written where everybody who touches them is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from gemini.capture.forms import Ref
from gemini.capture.graph import Graph
from gemini.capture.node import Node

# Functions whose result may look at the memory of their first argument.
_VIEWS = """
__getitem__ view view_as reshape reshape_as expand expand_as transpose transpose_ permute movedim moveaxis
swapaxes swapdims squeeze squeeze_ unsqueeze unsqueeze_ flatten unflatten ravel narrow select slice split
chunk tensor_split vsplit hsplit dsplit split_with_sizes unbind diagonal t T mT H mH adjoint unfold as_strided
detach detach_ alias real imag view_as_real view_as_complex contiguous to type type_as float double half
bfloat16 cpu cuda requires_grad_ atleast_1d atleast_2d atleast_3d broadcast_to broadcast_tensors meshgrid conj
data __get__ positive values indices movedim_ swapaxes_ swapdims_ t_ resolve_conj resolve_neg dropout
alpha_dropout dropout1d dropout2d dropout3d identity pad relu
"""
_VIEW_NAMES = frozenset(_VIEWS.split())
_VIEWING_MODULES = ("Flatten", "Unflatten", "Identity", "Dropout")


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
    """Groups of nodes that make, look at and write the same memory."""
    touching: dict[int, set[int]] | None = None
    for node in graph.compute_nodes:
        for ref in node.mutates:
            group: set[int] = {node.id}
            held: set[int] = set()
            for origin in _origins(graph, ref, node.id):
                (held if graph.nodes[origin].is_source else group).add(origin)
            if held and touching is None:
                touching = _touching(graph)
            for source in held:
                group |= (touching or {}).get(source, set())
            if len(group) > 1:
                yield group


def _touching(graph: Graph) -> dict[int, set[int]]:
    """Who reads each tensor that the caller or the model holds, directly or through views."""
    found: dict[int, set[int]] = defaultdict(set)
    for node in graph.compute_nodes:
        for ref in {*node.inputs(), *node.mutates}:
            for origin in _origins(graph, ref, node.id):
                if graph.nodes[origin].is_source:
                    found[origin].add(node.id)
    return found


def _origins(graph: Graph, ref: Ref, reader: int) -> Iterator[int]:
    """The nodes that a value's memory may have come through, back to the one that made it."""
    pending, seen = [ref.node], set()
    while pending:
        at = pending.pop()
        if at in seen or at > reader:
            continue
        seen.add(at)
        yield at
        node = graph.nodes[at]
        if node.is_source or not _may_view(node):
            continue
        pending += [source.node for source in node.inputs()]


def _may_view(node: Node) -> bool:
    if node.kind in ("op", "function"):
        parts = node.target.replace(":", ".").split(".")
        return node.kind == "function" or any(part in _VIEW_NAMES for part in parts[-2:]) or bool(node.mutates)
    if node.kind == "module":
        return node.cls.rpartition(".")[2].startswith(_VIEWING_MODULES) or bool(node.mutates)
    return True  # blocks and functions kept whole run any Python
