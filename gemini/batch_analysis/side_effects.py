"""Side effects of a model run, and when micro-batches may have them.

M runs have them M times. A buffer whose new contents do not depend on samples (a counter, a power iteration) may be
written: every micro-batch starts from its contents before the step, and leaves those of one run of the whole batch.
The rules determine whether contents depend on samples; any other effect is an obstacle. A write to a view
(`self.count.data.add_(1)`, `self.seen[0] += 1`) is a write to its base.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemini.capture.attribute_writes import ASSIGN
from gemini.ir.graph import Graph
from gemini.ir.node import Node


def find_obstacle(graph: Graph) -> str:
    """Return a side effect of a graph that no rule covers; '' if there is none."""
    held = dict(graph.bound_model().named_buffers(remove_duplicate=False))
    for node in graph.nodes:
        if node.changes and node.target != ASSIGN and node.kind != "module":
            return f"{node.name} changes state in every run ({', '.join(node.changes)})"
        for source in _written_sources(graph, node):
            if source.is_source and (source.kind != "buffer" or source.target not in held):
                return f"{node.name} writes the {source.kind} {source.target} in place"
    return ""


def written_buffers(graph: Graph) -> frozenset[str]:
    """Return the names of the buffers that a run may write."""
    model = graph.bound_model()
    found = {source.target for node in graph.nodes for source in _written_sources(graph, node)}
    for node in graph.nodes:
        for owner in node.changes if node.target != ASSIGN else ():
            module = model.get_submodule(owner)
            found |= {f"{owner}.{name}" if owner else name for name, _ in module.named_buffers(recurse=False)}
    return frozenset(found & dict(model.named_buffers(remove_duplicate=False)).keys())


def _written_sources(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the nodes whose values a node writes, and those whose memory these share."""
    for ref in node.mutates:
        source = graph.nodes[ref.node]
        yield source
        yield from (graph.nodes[index] for index in source.shares)
