"""Layout classes: nodes that share their layouts, because they are the same nodes of equivalent layers.

Layers are equivalent (`gemini.ir.equivalence`) and consecutive members of one list: their names differ in one number.
Calls of one module that runs several times with the same weights are equivalent, too, and so are the steps of a loop
that reads the same parameters in each (a loop over stacked experts).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np

from gemini.ir.graph import Graph
from gemini.ir.node import Node

_SHORTEST, _LONGEST = 4, 64  # nodes of a step


def layout_classes(graph: Graph, *, folds: bool = True) -> list[list[int]]:
    """Return the classes of all nodes, in order of their first members."""
    layers = layer_families(graph) if folds else {}
    calls = _repeated_calls(graph, layers) if folds else {}
    loops = loop_steps(graph) if folds else {}
    members: dict[tuple[str, int], list[int]] = {}
    position: dict[str, int] = defaultdict(int)
    for node in graph.nodes:
        layer, group = _layer_of(node, layers)
        if not layer and node.id in loops:
            members.setdefault(loops[node.id], []).append(node.id)
            continue
        repeated = next((scope for scope in node.scope if scope in calls), "") if not layer else ""
        if repeated and not node.is_source:
            layer = group = repeated
        at = position[layer]
        position[layer] += 1
        members.setdefault((group, at % calls[layer] if layer in calls else at), []).append(node.id)
    return sorted(members.values())


def loop_steps(graph: Graph) -> dict[int, tuple[str, int]]:
    """Return the nodes of loops over parts of a parameter: the loop, and the place in its step."""
    nodes = graph.compute_nodes
    names: dict[object, int] = {}
    keys = np.array([names.setdefault(_step_key(graph, node), len(names)) for node in nodes])
    found: dict[int, tuple[str, int]] = {}
    at = 0
    while at < len(nodes):
        length, count = _repetition(keys[at : at + 2 * _LONGEST]), 0
        if length:
            same = keys[at:-length] == keys[at + length :]
            count = 1 + (len(same) if same.all() else int(same.argmin())) // length
        if count < 3 or not any(_reads_weights(graph, node) for node in nodes[at : at + length]):
            at += 1
            continue
        end = at + count * length
        found.update({node.id: (f"loop {nodes[at].id}", place % length) for place, node in enumerate(nodes[at:end])})
        at = end
    return found


def _repetition(keys: np.ndarray[Any, Any]) -> int:
    """Return the length of the sequence that keys begin with and repeat at once; 0 for none."""
    for length in np.flatnonzero(keys[_SHORTEST : len(keys) // 2 + 1] == keys[0]) + _SHORTEST:
        if np.array_equal(keys[:length], keys[length : 2 * length]):
            return int(length)
    return 0


def _step_key(graph: Graph, node: Node) -> object:
    parameters = tuple(ref.node for ref in node.inputs() if graph.nodes[ref.node].kind == "parameter")
    return node.kind, node.target, node.scope, parameters, tuple(len(one.shape) for one in node.outputs.values())


def _repeated_calls(graph: Graph, layers: dict[str, str]) -> dict[str, int]:
    """Return the outermost modules with weights that run several times, and the number of nodes of one call."""
    sequences: dict[str, list[Node]] = defaultdict(list)
    for node in graph.compute_nodes:
        if not _layer_of(node, layers)[0]:
            for scope in node.scope:
                if scope:
                    sequences[scope].append(node)
    found: dict[str, int] = {}
    for scope, nodes in sequences.items():
        if not any(outer in found for outer in nodes[0].scope):
            length = _call_length(graph, nodes)
            if length < len(nodes):
                found[scope] = length
    return found


def _call_length(graph: Graph, nodes: list[Node]) -> int:
    """Return the length of the shortest sequence with weights that nodes repeat."""
    # The first call may be the one without a gradient.
    keys = [(node.kind, node.target, tuple((one.shape, one.dtype) for one in node.outputs.values())) for node in nodes]
    weights = [at for at, node in enumerate(nodes) if _reads_weights(graph, node)]
    for count in range(keys.count(keys[weights[0]]) if weights else 1, 1, -1):
        length, rest = divmod(len(keys), count)
        if not rest and all(key == keys[at % length] for at, key in enumerate(keys)):
            return length
    return len(keys)


def _reads_weights(graph: Graph, node: Node) -> bool:
    if any(graph.nodes[ref.node].kind == "parameter" for ref in node.inputs()):
        return True
    return node.kind == "module" and any(True for _ in graph.bound_model().get_submodule(node.target).parameters())


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
