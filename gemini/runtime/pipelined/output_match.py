"""Resembling: whether two ways through a model return the same, but for contents.

What a call returns is seen when one of its kind is made at once. Ways through branches on random numbers mostly differ
inside only: a layer more or less. What was seen of one then serves the others.
"""

from __future__ import annotations

from collections.abc import Hashable

from gemini.codegen.stage_steps import rewritten
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref


def returns_alike(one: Graph, other: Graph) -> bool:
    """Whether the outputs of two graphs have the same structure, sizes and types, and share memory in the same way."""
    return _outline(one) == _outline(other)


def _outline(graph: Graph) -> Hashable:
    places = {ref: at for at, ref in enumerate(graph.outputs())}
    form = rewritten(graph.result, lambda leaf: Ref(places[leaf]) if leaf in places else leaf)
    memory = [_memory(graph, ref.node) for ref in places]
    shared = tuple((a, b) for a in range(len(memory)) for b in range(a) if not memory[a].isdisjoint(memory[b]))
    return repr(form), tuple(_size(graph, ref) for ref in places), shared


def _size(graph: Graph, ref: Ref) -> Hashable:
    meta = graph.meta(ref)
    if meta.batch_factor == 0 or meta.strides is not None:  # how they grow with the batch is not known
        return ref, id(graph)
    shape = tuple(("n", meta.batch_factor) if at == meta.batch_dim else size for at, size in enumerate(meta.shape))
    return shape, meta.dtype, meta.device, meta.requires_grad, graph.nodes[ref.node].is_source


def _memory(graph: Graph, node: int) -> set[int]:
    """The nodes whose memory a result may look at."""
    found, waiting = set[int](), [node]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += graph.nodes[at].shares
    return found
