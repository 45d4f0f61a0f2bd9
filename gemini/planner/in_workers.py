"""Costs in workers: where a node takes another time there than alone in this process.

weight gradients     are added to their sums in place (`runtime.executor.store`): no memory is taken for them, and a
                     table of words is not gone through for a few of its rows
the loss             follows the last stage, on the outputs of the model; as it is not known yet, one of the most usual
                     stands for it, a softmax over the last dimension
other workers        compute at the same time (`contention`)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.allocator import freed_memory_kept
from gemini.backward import differentiate
from gemini.capture.graph import Graph
from gemini.capture.node import Node, TensorMeta
from gemini.planner.contention import measure
from gemini.profiling.costs import NodeCost
from gemini.profiling.flow import tensor_inputs
from gemini.profiling.result import Profile

_TRIES = 3
_LARGE = 1 << 20  # bytes: below it, neither memory nor a softmax is worth a look
_SHORT = 2.0  # ms: what is computed stays in caches, and is not worth probes that take a hundred times as long
Sizes = tuple[type, torch.Size, int, torch.dtype, bool]


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
            if (found := self._layer(cost)) is not None:
                yield found[0].weight.nbytes

    def stored(self, cost: NodeCost) -> NodeCost:
        """With the weight gradient as the store computes it; only where the layer is large, as else nothing differs."""
        found = self._layer(cost)
        if found is None:
            return cost
        layer, rows, has_input = found
        key: Sizes = type(layer), layer.weight.shape, rows, layer.weight.dtype, has_input
        if key not in self.known:
            self.known[key] = _ratio(layer, rows, has_input)
        return replace(cost, backward_ms=cost.backward_ms * self.known[key])

    def _layer(self, cost: NodeCost) -> tuple[Any, int, bool] | None:
        """The layer of a node that the store takes, the rows of its output, and whether its input has a gradient."""
        node = self.graph.nodes[cost.id]
        if node.kind != "module" or node.checkpoint or (node.region is not None and node.region.autocast):
            return None
        layer = self.model.get_submodule(node.target) if node.target else self.model
        if type(layer) not in (nn.Linear, nn.Embedding) or not layer.weight.requires_grad or cost.backward_ms <= 0:
            return None
        if layer.weight.nbytes < _LARGE or layer.weight.device.type != "cpu":
            return None
        (meta, *_) = node.outputs.values()
        return layer, meta.numel // max(1, meta.shape[-1]), self._has_input(node)

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


def _is_scored(meta: TensorMeta) -> bool:
    dtype = getattr(torch, meta.dtype)
    large = meta.numel * dtype.itemsize >= _LARGE and len(meta.shape) > 1
    return meta.requires_grad and large and dtype.is_floating_point and meta.device == "cpu"


def _softmax_ms(meta: TensorMeta) -> tuple[float, float]:
    given = torch.zeros(tuple(meta.shape), dtype=getattr(torch, meta.dtype), requires_grad=True)
    with torch.enable_grad():
        made = torch.log_softmax(given, -1)
        gradient = torch.zeros_like(made)
        forward = _quickest(lambda: torch.log_softmax(given, -1))
        backward = _quickest(lambda: differentiate([made], [gradient], [given], retain_graph=True))
    return forward, backward


def _ratio(layer: nn.Linear | nn.Embedding, rows: int, has_input: bool) -> float:
    """The time of a backward with the gradient of its weight added in place, over that of the ordinary one."""
    weight = layer.weight.detach()
    total = torch.zeros_like(weight)
    if isinstance(layer, nn.Embedding):
        at, gradient = torch.arange(rows) % weight.shape[0], weight.new_ones(rows, weight.shape[1])
        dense = torch.ops.aten.embedding_dense_backward
        usual = _quickest(lambda: dense(gradient, at, weight.shape[0], -1, False))
        return _quickest(lambda: total.index_add_(0, at, gradient)) / max(usual, 1e-6)
    gradient, given = weight.new_ones(rows, weight.shape[0]), weight.new_ones(rows, weight.shape[1])
    back = _quickest(lambda: gradient.mm(weight)) if has_input else 0.0
    usual = _quickest(lambda: gradient.t().mm(given))
    return (back + _quickest(lambda: total.addmm_(gradient.t(), given))) / max(back + usual, 1e-6)


def _quickest(call: Callable[[], Any]) -> float:
    """The time of a call that nothing disturbs; on one thread its own, else that of the clock."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(_TRIES + 1):
        begin = clock()
        call()
        found.append((clock() - begin) * 1e3)
    return min(found[1:])
