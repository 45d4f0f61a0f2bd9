"""Effects: what a run of a model leaves behind, and when it may be left by micro-batches.

M runs would leave it M times. A buffer whose new contents are the same whatever the samples (a counter, a power
iteration) may be written all the same: every micro-batch finds it as it was before the step, and leaves it as one run
of the whole batch would. Whether contents depend on samples is for the rules to say; anything else is an obstacle.
A write to a view (`self.count.data.add_(1)`, `self.seen[0] += 1`) is one to what it looks at.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemini.capture.attribute_writes import ASSIGN
from gemini.ir.graph import Graph
from gemini.ir.node import Node


def find_obstacle(graph: Graph) -> str:
    """What a graph leaves behind in a way that no rule follows; '' if nothing."""
    held = dict(graph.bound_model().named_buffers(remove_duplicate=False))
    for node in graph.nodes:
        if node.changes and node.target != ASSIGN and node.kind != "module":
            return f"{node.name} keeps something of every run ({', '.join(node.changes)})"
        for source in _written_sources(graph, node):
            if source.is_source and (source.kind != "buffer" or source.target not in held):
                return f"{node.name} writes the {source.kind} {source.target} in place"
    return ""


def written_buffers(graph: Graph) -> frozenset[str]:
    """The names of the buffers that a run may write."""
    model = graph.bound_model()
    found = {source.target for node in graph.nodes for source in _written_sources(graph, node)}
    for node in graph.nodes:
        for owner in node.changes if node.target != ASSIGN else ():
            module = model.get_submodule(owner)
            found |= {f"{owner}.{name}" if owner else name for name, _ in module.named_buffers(recurse=False)}
    return frozenset(found & dict(model.named_buffers(remove_duplicate=False)).keys())


def _written_sources(graph: Graph, node: Node) -> Iterator[Node]:
    """The nodes whose values a node writes, and those whose memory these look at."""
    for ref in node.mutates:
        source = graph.nodes[ref.node]
        yield source
        yield from (graph.nodes[index] for index in source.shares)
