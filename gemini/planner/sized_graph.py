"""Sized graph: a captured graph with the sizes of another number of samples."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import TensorMeta


def at_samples(graph: Graph, samples: int | None) -> Graph:
    """Return a graph with the sizes of another number of samples."""
    if graph.batch_size == samples or samples is None:
        return graph
    nodes = []
    for node in graph.nodes:
        changed = copy.copy(node)
        changed.outputs = {key: _meta_at(meta, samples) for key, meta in node.outputs.items()}
        nodes.append(changed)
    return replace(graph, nodes=nodes, batch_size=samples, variants=None)


def _meta_at(meta: TensorMeta, samples: int) -> TensorMeta:
    if meta.batch_dim is None:
        return meta
    shape, before = list(meta.shape), meta.shape[meta.batch_dim]
    shape[meta.batch_dim] = after = samples * meta.batch_factor
    strides = meta.strides
    if strides is not None:  # those of outer dimensions count samples
        own = strides[meta.batch_dim]
        strides = tuple(one * after // before if one > own and before else one for one in strides)
    return replace(meta, shape=tuple(shape), strides=strides)
