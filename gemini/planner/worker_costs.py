"""Worker costs: differences between the time of a node in a worker and alone in this process.

weight gradients     are accumulated in place (`step.delayed_weight_grads`): no memory is allocated for them, an
                     embedding touches only its used rows, and they are computed separately from input gradients
                     (`delayed_gradient_costs`), except for norms and similar ops, where autograd computes both at once
the loss             follows the last stage; since it is unknown when planning, a softmax represents it, over the last
                     dimension, or over the channels of an image
other workers        compute at the same time (`contention`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gemini.autograd_engine import differentiate
from gemini.ir.graph import Graph
from gemini.ir.node import Node, TensorMeta
from gemini.malloc import retain_freed_memory
from gemini.planner.contention import measure_contention
from gemini.planner.delayed_gradient_costs import (
    CONVOLUTIONS,
    UNCHANGED,
    BackwardCost,
    layer_overhead_ms,
    measure_convolution_backward,
    min_time_ms,
)
from gemini.planner.plan_request import PlanRequest
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.node_tensors import tensor_inputs
from gemini.profiling.profile_result import Profile

_LARGE = 1 << 20  # bytes: smaller weights cost nothing to allocate
_MIN_SCORES = 1 << 16  # bytes: a softmax of less takes microseconds
_SHORT = 5.0  # ms: such a model stays in the caches, and does not justify probes of a hundred times its duration
# Autograd computes their weight gradients together with those of their inputs.
_AT_ONCE = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.modules.conv._ConvTransposeNd, nn.PReLU,
)  # fmt: skip
Sizes = tuple[type, torch.Size, tuple[int, ...], torch.dtype, bool]


def estimate_worker_costs(profile: Profile, graph: Graph, request: PlanRequest) -> Profile:
    """Return the profile of a micro-batch on a CPU with the times that it will have in workers."""
    costs = _WorkerCosts(graph)
    with torch.random.fork_rng(devices=[]), retain_freed_memory(costs.large_weights(profile)):
        nodes = tuple(costs.add_loss(costs.delay_weight_gradient(cost)) for cost in profile.nodes)
    found = replace(profile, nodes=nodes)
    if found.forward_ms + found.backward_ms < _SHORT:
        return found
    return measure_contention(request.workers, request.threads, request.measure_speeds).slow_down(found)


class _WorkerCosts:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.model = graph, graph.bound_model()
        self.results = {(ref.node, ref.source, ref.path) for ref in graph.outputs()}
        self.known: dict[Sizes, BackwardCost] = {}

    # ── weight gradients ───────────────────────────────────────────────────────────────────────────────────────
    def large_weights(self, profile: Profile) -> Iterator[int]:
        """Yield the bytes of large weights."""
        for cost in profile.nodes:
            layer = self._layer(cost)
            if layer is not None and layer.weight.nbytes >= _LARGE:
                yield layer.weight.nbytes

    def delay_weight_gradient(self, cost: NodeCost) -> NodeCost:
        """Return the cost with a delayed weight gradient."""
        layer = self._layer(cost)
        if layer is None:
            return replace(cost, weight_share=0.0) if isinstance(self._module(cost), _AT_ONCE) else cost
        forward, backward = layer_overhead_ms()
        found = self._measure_backward(cost, layer)
        changed = cost.backward_ms * found.ratio + backward
        return replace(cost, forward_ms=cost.forward_ms + forward, backward_ms=changed, weight_share=found.weight_share)

    def _measure_backward(self, cost: NodeCost, layer: Any) -> BackwardCost:
        """Measure a backward in two parts; only large matrix products differ from the ordinary one."""
        node = self.graph.nodes[cost.id]
        (meta, *_) = node.outputs.values()
        shapes = [self.graph.meta(ref).shape for ref in tensor_inputs(node)]
        if len(shapes) != 1 or isinstance(getattr(layer, "padding", 0), str):
            return UNCHANGED
        is_convolution = isinstance(layer, CONVOLUTIONS)
        if is_convolution and len(shapes[0]) != layer.weight.dim():
            return UNCHANGED
        if not is_convolution and layer.weight.nbytes < _LARGE:
            return UNCHANGED
        key: Sizes = type(layer), layer.weight.shape, shapes[0], layer.weight.dtype, self._has_input(node)
        if key not in self.known:
            rows = meta.numel // max(1, meta.shape[-1])
            self.known[key] = (
                measure_convolution_backward(layer, shapes[0], meta.shape, key[-1])
                if is_convolution
                else _measure_product_backward(layer, rows, key[-1])
            )
        return self.known[key]

    def _layer(self, cost: NodeCost) -> Any:
        """Return the layer of a node, if its weight gradient is delayed."""
        node, layer = self.graph.nodes[cost.id], self._module(cost)
        if layer is None or node.checkpoint or (node.region is not None and node.region.autocast):
            return None
        known = type(layer) in (nn.Linear, nn.Embedding, *CONVOLUTIONS)
        return layer if known and layer.weight.requires_grad and cost.backward_ms > 0 and _is_on_cpu(layer) else None

    def _module(self, cost: NodeCost) -> Any:
        """Return the module that a node calls, if any."""
        node = self.graph.nodes[cost.id]
        if node.kind != "module":
            return None
        return self.model.get_submodule(node.target) if node.target else self.model

    def _has_input(self, node: Node) -> bool:
        metas = [self.graph.nodes[ref.node].outputs.get((ref.source, ref.path)) for ref in tensor_inputs(node)]
        return any(meta is not None and meta.requires_grad for meta in metas)

    # ── the loss ───────────────────────────────────────────────────────────────────────────────────────────────
    def add_loss(self, cost: NodeCost) -> NodeCost:
        """Return the cost with that of the loss on outputs of this node."""
        outputs = self.graph.nodes[cost.id].outputs
        for (source, path), meta in outputs.items():
            if (cost.id, source, path) in self.results and _has_loss(meta):
                forward, backward = _measure_softmax(meta)
                share = cost.weight_share
                if share is not None:
                    share *= cost.backward_ms / max(cost.backward_ms + backward, 1e-9)
                cost = replace(
                    cost,
                    forward_ms=cost.forward_ms + forward,
                    backward_ms=cost.backward_ms + backward,
                    weight_share=share,
                )
        return cost


def _is_on_cpu(layer: Any) -> bool:
    return bool(layer.weight.device.type == "cpu")


def _has_loss(meta: TensorMeta) -> bool:
    dtype = getattr(torch, meta.dtype)
    large = meta.numel * dtype.itemsize >= _MIN_SCORES and len(meta.shape) > 1
    return meta.requires_grad and large and dtype.is_floating_point and meta.device == "cpu"


def _measure_softmax(meta: TensorMeta) -> tuple[float, float]:
    given = torch.zeros(tuple(meta.shape), dtype=getattr(torch, meta.dtype), requires_grad=True)
    dim = 1 if len(meta.shape) > 3 else -1  # the channels of an image, else the last
    with torch.enable_grad():
        made = torch.log_softmax(given, dim)
        gradient = torch.zeros_like(made)
        forward = min_time_ms(lambda: torch.log_softmax(given, dim))
        backward = min_time_ms(lambda: differentiate([made], [gradient], [given], retain_graph=True))
    return forward, backward


def _measure_product_backward(layer: nn.Linear | nn.Embedding, rows: int, has_input: bool) -> BackwardCost:
    """Measure the backward of a matrix product with the weight gradient accumulated in place."""
    weight = layer.weight.detach()
    total = torch.zeros_like(weight)
    if isinstance(layer, nn.Embedding):
        at, gradient = torch.arange(rows) % weight.shape[0], weight.new_ones(rows, weight.shape[1])
        dense = torch.ops.aten.embedding_dense_backward
        usual = min_time_ms(lambda: dense(gradient, at, weight.shape[0], -1, False))
        return BackwardCost.from_times(0.0, min_time_ms(lambda: total.index_add_(0, at, gradient)), usual)
    gradient, given = weight.new_ones(rows, weight.shape[0]), weight.new_ones(rows, weight.shape[1])
    back = min_time_ms(lambda: gradient.mm(weight)) if has_input else 0.0
    usual = min_time_ms(lambda: gradient.t().mm(given))
    return BackwardCost.from_times(back, min_time_ms(lambda: total.addmm_(gradient.t(), given)), back + usual)
