"""Gradient flow: the values of a graph that receive a gradient in a training step, and from how many readers.

Backward starts at the loss: the scalar outputs, or all differentiable outputs where there is no scalar. A node has a
backward if one of its outputs lies on a path to them. Gradients of a value with several readers are summed, and the sum
is part of the step:

        ┌─► q ─┐
    x ──┼─► k ─┼─► …        backward of x adds up three gradients: two additions of the size of x
        └─► v ─┘

Likewise for a parameter that several nodes use: all but the last of them add to an existing gradient.
"""

from __future__ import annotations

from collections import Counter

import torch

from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.ir.pytree import Ref
from gemini.profiling.node_tensors import model_tensors, tensor_inputs, tensor_outputs

SUMMABLE = ("float", "bfloat", "complex")


class GradientFlow:
    """The gradients of a step: `received[value]` is the number of readers that send a gradient to a value."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = {node.id: tensor_inputs(node) for node in graph.nodes}  # tensors read by a node
        self.roots = self._roots()
        self.received: Counter[Ref] = Counter(self.roots)
        self.active: set[int] = set()
        self.inplace_readers: dict[int, tuple[int, ...]] = {}  # per in-place node: gradients of the written values
        self.shared: dict[int, list[torch.Tensor]] = {}  # parameters that already have a gradient from a later node
        self.model_tensors: dict[int, list[torch.Tensor]] = {}  # parameters and buffers that a node uses
        self.trained: dict[int, list[torch.Tensor]] = {}  # those that receive gradients, filled on first run
        self.codes: dict[type, str] = {}  # fingerprints of the code of classes
        with_gradient: set[int] = set()
        for node in reversed(graph.nodes):
            self._backward(node)
            self.model_tensors[node.id] = [] if node.is_source else model_tensors(graph, graph.bound_model(), node)
            if node.id in self.active:
                used = [t for t in self.model_tensors[node.id] if t.requires_grad]
                self.shared[node.id] = [tensor for tensor in used if id(tensor) in with_gradient]
                with_gradient.update(map(id, used))

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
        self.inplace_readers[node.id] = tuple(self.received[ref] for ref in node.mutates)
        for ref in self.inputs[node.id]:
            if not self._differentiable(ref):
                continue
            # An overwritten value has one gradient, from this node; its later readers read the written value.
            self.received[ref] = 1 if ref in node.mutates else self.received[ref] + 1

    def readers(self, node: Node) -> tuple[int, ...]:
        """Return the number of gradients for every output of a node, then for every value it writes in place."""
        if node.id not in self.active:
            return ()
        return (*(self.received[ref] for ref in tensor_outputs(node)), *self.inplace_readers[node.id])
