"""Gradient flow: which values of a graph receive a gradient in a training step, and from how many readers.

A step runs backward from the loss: the scalars among the outputs, or all differentiable outputs where there is no
scalar. A node takes part in backward if one of its results lies on a way to them. Where a value has several readers,
their gradients are summed, and that sum is part of the step:

        ┌─► q ─┐
    x ──┼─► k ─┼─► …        backward of x adds up three gradients: two additions of the size of x
        └─► v ─┘

Likewise a parameter that several nodes use: all but the last of them add to a gradient that is there already.
"""

from __future__ import annotations

from collections import Counter

import torch

from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.ir.pytree import Ref
from gemini.profiling.node_tensors import held_tensors, tensor_inputs, tensor_outputs

SUMMABLE = ("float", "bfloat", "complex")


class GradientFlow:
    """The gradients of a step: `received[value]` is the number of readers that send one to a value."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = {node.id: tensor_inputs(node) for node in graph.nodes}  # what a node reads
        self.roots = self._roots()
        self.received: Counter[Ref] = Counter(self.roots)
        self.active: set[int] = set()
        self.later: dict[int, tuple[int, ...]] = {}  # of nodes that write in place: readers of what they wrote
        self.shared: dict[int, list[torch.Tensor]] = {}  # parameters that a later node has given a gradient already
        self.held: dict[int, list[torch.Tensor]] = {}  # tensors of the model that a node uses
        self.ends: dict[int, list[torch.Tensor]] = {}  # those its backward gives gradients, as far as it was run
        self.codes: dict[type, str] = {}  # fingerprints of the code of classes
        given: set[int] = set()
        for node in reversed(graph.nodes):
            self._backward(node)
            self.held[node.id] = [] if node.is_source else held_tensors(graph, graph.bound_model(), node)
            if node.id in self.active:
                used = [t for t in self.held[node.id] if t.requires_grad]
                self.shared[node.id] = [tensor for tensor in used if id(tensor) in given]
                given.update(map(id, used))

    def _roots(self) -> list[Ref]:
        found = [ref for ref in self.graph.outputs() if self._differentiable(ref)]
        scalars = [ref for ref in found if self.graph.meta(ref).numel == 1]
        return scalars or found

    def _differentiable(self, ref: Ref) -> bool:
        meta = self.graph.nodes[ref.node].outputs.get((ref.source, ref.path))
        return meta is not None and meta.requires_grad and meta.dtype.startswith(SUMMABLE)

    def _backward(self, node: Node) -> None:
        if node.is_source or (node.region is not None and not node.region.grad):
            return
        if not any(ref in self.received for ref in (*tensor_outputs(node), *node.mutates)):
            return
        self.active.add(node.id)
        self.later[node.id] = tuple(self.received[ref] for ref in node.mutates)
        for ref in self.inputs[node.id]:
            if not self._differentiable(ref):
                continue
            # What is overwritten has one gradient, from here; its later readers read what was written.
            self.received[ref] = 1 if ref in node.mutates else self.received[ref] + 1

    def readers(self, node: Node) -> tuple[int, ...]:
        """For every output of a node, and then for every value it writes in place, how many gradients reach it."""
        if node.id not in self.active:
            return ()
        return (*(self.received[ref] for ref in tensor_outputs(node)), *self.later[node.id])
