"""Equivalence: classes of equivalent nodes and layers of a graph.

Equivalent nodes (`gemini.ir.node_signature`) are profiled once. A *layer* is an open module or a block. Layers with
pairwise equivalent nodes and the same dataflow between them form one class; gradient flags and strides of inputs do
not count, so that a first layer belongs to the class of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemini.ir.node_signature import node_signature

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import Node

__all__ = ["layer_classes", "node_classes", "node_signature"]


def node_classes(graph: Graph) -> dict[str, list[int]]:
    """Return the classes of equivalent nodes, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for node in graph.compute_nodes:
        found.setdefault(node_signature(graph, node), []).append(node.id)
    return found


def layer_classes(graph: Graph) -> list[list[str]]:
    """Return groups of two or more equivalent layers, the largest first; layers inside a grouped one are left out."""
    signatures = {node.id: node_signature(graph, node, costs=False) for node in graph.compute_nodes}
    contents: dict[str, list[Node]] = {}
    for node in graph.compute_nodes:
        for scope in dict.fromkeys((*node.scope, *((node.target,) if node.kind == "block" else ()))):
            contents.setdefault(scope, []).append(node)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for scope, inside in contents.items():
        groups.setdefault(_layer_key(inside, signatures), []).append(scope)
    found = sorted((g for g in groups.items() if len(g[1]) > 1), key=lambda group: -len(group[0]) * len(group[1]))
    taken: list[str] = []
    chosen = []
    for _, scopes in found:
        if any(scope == one or scope.startswith(f"{one}.") for scope in scopes for one in taken):
            continue
        taken += scopes
        chosen.append(scopes)
    return chosen


def _layer_key(inside: list[Node], signatures: dict[int, str]) -> tuple[Any, ...]:
    """Return the nodes of a layer with their inputs: inner nodes by position, outer ones by order of first use."""
    position = {node.id: index for index, node in enumerate(inside)}
    outside: dict[Any, int] = {}
    return tuple(
        (
            signatures[node.id],
            tuple(
                (position[ref.node], ref.source, ref.path)
                if ref.node in position
                else ("outside", outside.setdefault(ref, len(outside)))
                for ref in node.inputs()
            ),
        )
        for node in inside
    )
