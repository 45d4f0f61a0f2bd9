"""Sized graph: a captured graph with the sizes of another number of samples."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini.planner.free_sizes import resize_strides

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import TensorMeta


class UnknownStrides(Exception):
    """A value has gaps in memory."""


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
    shape = list(meta.shape)
    shape[meta.batch_dim] = samples * meta.batch_factor
    strides = None if meta.strides is None else resize_strides(meta.shape, meta.strides, shape)
    if meta.strides is not None and strides is None:
        raise UnknownStrides
    return replace(meta, shape=tuple(shape), strides=strides)
