"""Costs in workers: where a node takes another time there than alone in this process.

weight gradients     are added to their sums in place (`runtime.executor.store`): no memory is taken for them, and a
                     table of words is not gone through for a few of its rows; and apart from those of inputs
                     (`stored_layers`)
the loss             follows the last stage, on the outputs of the model; as it is not known yet, one of the most usual
                     stands for it, a softmax over the last dimension
other workers        compute at the same time (`contention`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.allocator import freed_memory_kept
from gemini.backward import differentiate
from gemini.capture.graph import Graph
from gemini.capture.node import Node, TensorMeta
from gemini.planner.contention import measure
from gemini.planner.stored_layers import CONVOLUTIONS, around, convolution_ratio, quickest
from gemini.profiling.costs import NodeCost
from gemini.profiling.flow import tensor_inputs
from gemini.profiling.result import Profile

_LARGE = 1 << 20  # bytes: below it, neither memory nor a softmax is worth a look
_SHORT = 2.0  # ms: what is computed stays in caches, and is not worth probes that take a hundred times as long
Sizes = tuple[type, torch.Size, tuple[int, ...], torch.dtype, bool]


def as_in_workers(profile: Profile, graph: Graph, workers: int, threads: int) -> Profile:
    """The profile of a micro-batch on a CPU, with times as workers will have them."""
    costing = _Costing(graph)
    with torch.random.fork_rng(devices=[]), freed_memory_kept(costing.sizes(profile)):
        nodes = tuple(costing.with_loss(costing.stored(cost)) for cost in profile.nodes)
    found = replace(profile, nodes=nodes)
    return found if found.forward_ms + found.backward_ms < _SHORT else measure(workers, threads).slowed(found)


class _Costing:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.model = graph, graph.bound_model()
        self.results = {(ref.node, ref.source, ref.path) for ref in graph.outputs()}
        self.known: dict[Sizes, float] = {}

    # ── weight gradients ───────────────────────────────────────────────────────────────────────────────────────
    def sizes(self, profile: Profile) -> Iterator[int]:
        """Bytes of large weights, whose gradients take as much."""
        for cost in profile.nodes:
            layer = self._layer(cost)
            if layer is not None and layer.weight.nbytes >= _LARGE:
                yield layer.weight.nbytes

    def stored(self, cost: NodeCost) -> NodeCost:
        """With the weight gradient as the store computes it."""
        layer = self._layer(cost)
        if layer is None:
            return cost
        forward, backward = around()
        changed = cost.backward_ms * self._ratio(cost, layer) + backward
        return replace(cost, forward_ms=cost.forward_ms + forward, backward_ms=changed)

    def _ratio(self, cost: NodeCost, layer: Any) -> float:
        """How many times as long the kernels of a backward take; products only differ where they are large."""
        node = self.graph.nodes[cost.id]
        (meta, *_) = node.outputs.values()
        shapes = [self.graph.meta(ref).shape for ref in tensor_inputs(node)]
        if len(shapes) != 1 or isinstance(getattr(layer, "padding", 0), str):
            return 1.0
        is_convolution = isinstance(layer, CONVOLUTIONS)
        if is_convolution and len(shapes[0]) != layer.weight.dim():
            return 1.0
        if not is_convolution and layer.weight.nbytes < _LARGE:
            return 1.0
        key: Sizes = type(layer), layer.weight.shape, shapes[0], layer.weight.dtype, self._has_input(node)
        if key not in self.known:
            rows = meta.numel // max(1, meta.shape[-1])
            self.known[key] = (
                convolution_ratio(layer, shapes[0], meta.shape, key[-1])
                if is_convolution
                else _ratio(layer, rows, key[-1])
            )
        return self.known[key]

    def _layer(self, cost: NodeCost) -> Any:
        """The layer of a node, if the store takes it."""
        node = self.graph.nodes[cost.id]
        if node.kind != "module" or node.checkpoint or (node.region is not None and node.region.autocast):
            return None
        layer = self.model.get_submodule(node.target) if node.target else self.model
        known = type(layer) in (nn.Linear, nn.Embedding, *CONVOLUTIONS)
        return layer if known and layer.weight.requires_grad and cost.backward_ms > 0 and _is_here(layer) else None

    def _has_input(self, node: Node) -> bool:
        metas = [self.graph.nodes[ref.node].outputs.get((ref.source, ref.path)) for ref in tensor_inputs(node)]
        return any(meta is not None and meta.requires_grad for meta in metas)

    # ── the loss ───────────────────────────────────────────────────────────────────────────────────────────────
    def with_loss(self, cost: NodeCost) -> NodeCost:
        """With the loss of what the model returns of this node."""
        outputs = self.graph.nodes[cost.id].outputs
        for (source, path), meta in outputs.items():
            if (cost.id, source, path) in self.results and _is_scored(meta):
                forward, backward = _softmax_ms(meta)
                cost = replace(cost, forward_ms=cost.forward_ms + forward, backward_ms=cost.backward_ms + backward)
        return cost


def _is_here(layer: Any) -> bool:
    return bool(layer.weight.device.type == "cpu")


def _is_scored(meta: TensorMeta) -> bool:
    dtype = getattr(torch, meta.dtype)
    large = meta.numel * dtype.itemsize >= _LARGE and len(meta.shape) > 1
    return meta.requires_grad and large and dtype.is_floating_point and meta.device == "cpu"


def _softmax_ms(meta: TensorMeta) -> tuple[float, float]:
    given = torch.zeros(tuple(meta.shape), dtype=getattr(torch, meta.dtype), requires_grad=True)
    with torch.enable_grad():
        made = torch.log_softmax(given, -1)
        gradient = torch.zeros_like(made)
        forward = quickest(lambda: torch.log_softmax(given, -1))
        backward = quickest(lambda: differentiate([made], [gradient], [given], retain_graph=True))
    return forward, backward


def _ratio(layer: nn.Linear | nn.Embedding, rows: int, has_input: bool) -> float:
    """The time of a backward with the gradient of its weight added in place, over that of the ordinary one."""
    weight = layer.weight.detach()
    total = torch.zeros_like(weight)
    if isinstance(layer, nn.Embedding):
        at, gradient = torch.arange(rows) % weight.shape[0], weight.new_ones(rows, weight.shape[1])
        dense = torch.ops.aten.embedding_dense_backward
        usual = quickest(lambda: dense(gradient, at, weight.shape[0], -1, False))
        return quickest(lambda: total.index_add_(0, at, gradient)) / max(usual, 1e-6)
    gradient, given = weight.new_ones(rows, weight.shape[0]), weight.new_ones(rows, weight.shape[1])
    back = quickest(lambda: gradient.mm(weight)) if has_input else 0.0
    usual = quickest(lambda: gradient.t().mm(given))
    return (back + quickest(lambda: total.addmm_(gradient.t(), given))) / max(back + usual, 1e-6)
