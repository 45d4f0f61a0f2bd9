"""Layout classes: nodes that share their layouts, because they are the same nodes of equivalent layers.

Layers are equivalent (`gemini.ir.equivalence`) and consecutive members of one list: their names differ in one number.
"""

from __future__ import annotations

import re
from collections import defaultdict

from gemini.ir.graph import Graph
from gemini.ir.node import Node


def layout_classes(graph: Graph, *, folds: bool = True) -> list[list[int]]:
    """Return the classes of all nodes, in order of their first members."""
    layers = layer_families(graph) if folds else {}
    members: dict[tuple[str, int], list[int]] = {}
    position: dict[str, int] = defaultdict(int)
    for node in graph.nodes:
        layer, group = _layer_of(node, layers)
        at = position[layer]
        position[layer] += 1
        members.setdefault((group, at), []).append(node.id)
    return sorted(members.values())


def _layer_of(node: Node, layers: dict[str, str]) -> tuple[str, str]:
    """Return the layer that a node is in, and its group; all other nodes are in one."""
    for scope in node.scope:
        if scope in layers:
            return scope, layers[scope]
    if node.kind == "block" and node.target in layers:
        return node.target, layers[node.target]
    return "", ""


def layer_families(graph: Graph) -> dict[str, str]:
    """Return the scopes of equivalent layers, and the name of each list: `h.*`."""
    found: dict[str, str] = {}
    for scopes in graph.layers():
        families: dict[str, list[str]] = defaultdict(list)
        for scope in scopes:
            for match in re.finditer(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", scope):
                families[f"{scope[: match.start()]}*{scope[match.end() :]}"].append(scope)
        for family, own in families.items():
            if len(own) > 1:
                found.update({scope: family for scope in own if scope not in found})
    return found
