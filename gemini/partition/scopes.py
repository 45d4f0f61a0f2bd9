"""Scopes: what a stage holds, in words a reader of the model knows.

The nodes of a stage are runs of neighbours in execution order. A run is named by where it begins and ends, each the
outermost module that is in the stage as a whole:

    bert.embeddings … encoder.layer.11.attention
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.capture.graph import Graph
from gemini.capture.node import Node
from gemini.partition.partition import Partition

WHOLE = "the whole model"
_SHOWN = 2  # runs of a stage that are named


def stage_scopes(graph: Graph, partition: Partition, weight: dict[int, float]) -> tuple[str, ...]:
    """What each stage holds; of many runs those that weigh most are named (`weight` of each node)."""
    whole: dict[str, int | None] = {}  # the only stage of a scope; None: several
    for node in graph.compute_nodes:
        stage = partition.stage_of[node.id]
        for scope in _names(node):
            whole[scope] = stage if whole.get(scope, stage) == stage else None
    if partition.nstages == 1:
        return (WHOLE,)
    place = {node.id: at for at, node in enumerate(graph.compute_nodes)}
    return tuple(
        _described(graph, _runs(nodes, place), stage, whole, weight) for stage, nodes in enumerate(partition.stages)
    )


def _runs(nodes: Sequence[int], place: dict[int, int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for node in nodes:
        if runs and place[node] == place[runs[-1][-1]] + 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _described(
    graph: Graph, runs: list[list[int]], stage: int, whole: dict[str, int | None], weight: dict[int, float]
) -> str:
    heavy = sorted(range(len(runs)), key=lambda at: (-sum(weight[node] for node in runs[at]), at))[:_SHOWN]
    texts = [
        span_text(_outermost(graph.nodes[run[0]], stage, whole), _outermost(graph.nodes[run[-1]], stage, whole))
        for run in (runs[at] for at in sorted(heavy))
    ]
    hidden = len(runs) - len(heavy)
    return ", ".join(dict.fromkeys(texts)) + (f" and {hidden} more" if hidden else "")


def _outermost(node: Node, stage: int, whole: dict[str, int | None]) -> str:
    """The largest module around a node that lies in the stage; the node itself if none does."""
    return next((scope for scope in _names(node) if whole.get(scope) == stage), node.name)


def _names(node: Node) -> list[str]:
    return [scope for scope in node.scope if scope]


def span_text(first: str, last: str) -> str:
    """From one name to another, without repeating what both begin with."""
    if first == last:
        return first
    one, other = first.split("."), last.split(".")
    shared = 0
    while shared < min(len(one), len(other)) - 1 and one[shared] == other[shared]:
        shared += 1
    if shared and other[shared].isdigit():
        shared -= 1  # a bare number says nothing: layer.11, not 11
    return f"{first} … {'.'.join(other[shared:])}"
