"""Long loops: consecutive iterations of a loop of the model as one item, so that partitioners see few items.

Stages are cut between iterations, and between a limited number of places per worker:

    nodes    embed │ cell head │ cell head │ cell head │ cell head │ … │ join
    items    embed │       turn 0, 1       │       turn 2, 3       │ … │ join

Iterations are consecutive nodes in the order of capture, which is topological, so items made of them depend on each
other in that order too.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemini.ir.graph import Graph
from gemini.ir.repeats import Repeats

_LONG = 64  # iterations: cuts inside one are of no use for the balance
_ITEMS = 64  # per worker, of a loop


def find_turns(graph: Graph, nparts: int) -> Iterator[list[int]]:
    """Yield the nodes that one item holds: one or more iterations of a long loop."""
    nodes = list(graph.compute_nodes)
    repeats = Repeats((node.kind, node.target, node.scope) for node in nodes)
    done = at = 0  # nodes in items; nodes inspected
    while at < len(nodes):
        span = next((one for one in repeats.spans(at, done) if one.turns >= _LONG), None)
        if span is None:
            at += 1
            continue
        size = span.period * -(-span.turns // (_ITEMS * nparts))
        done = at = span.start + span.turns * span.period
        for begin in range(span.start, done, size):
            yield [node.id for node in nodes[begin : min(begin + size, done)]]
