"""Meta run: a graph walk on meta tensors, to count work and memory at any size.

Nothing is computed or allocated. Meta tensors replace parameters while a module runs; the model is not changed. For a
node that needs values (it reads one, or computes outside torch) only the sizes of arguments and results are known.
Attention runs as one fused kernel, as on a device; torch itself takes it apart on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from gemini.ir.graph import Graph
from gemini.ir.node import MODULES, Node
from gemini.profiling.flop_count import KernelCounts, memory_traffic
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import GraphWalk
from gemini.profiling.measured_device import MB
from gemini.profiling.node_memory import LiveMemory, NodeMemory
from gemini.profiling.node_runner import IsolatedNode, count_isolated
from gemini.profiling.node_tensors import MODEL_TENSORS, tensor_inputs, tensor_outputs, value_size, values_size

META = torch.device("meta")


class FusedAttention(TorchFunctionMode):  # type: ignore[misc]
    """Runs attention on meta tensors as a fused kernel, which keeps no scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a call of attention where a fused kernel exists for it."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_attention(  # noqa: PLR0917
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    is_fused = query.is_meta and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not is_fused or (attn_mask is not None and attn_mask.requires_grad):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)[0]


class MetaWalk(GraphWalk):
    """A walk on meta tensors; a node that fails on them yields tensors of its captured sizes."""

    def __init__(self, graph: Graph, inputs: dict[int, torch.Tensor]) -> None:
        super().__init__(graph, inputs, META)
        self.copies: dict[int, torch.Tensor] = {}

    def _source(self, node: Node) -> torch.Tensor:
        return self.substitute(super()._source(node))

    def substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor, the same one each time."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self.copies:
            copy = tensor.detach().to(META)
            self.copies[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        return self.copies[id(tensor)]

    def make_call(self, node: Node, args: Any, kwargs: Any) -> Callable[[], Any]:
        """Return a call of a node with meta tensors for model tensors."""
        return lambda: self._call(node, args, kwargs)

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        if not self.is_relocated or node.kind not in MODULES:
            return super()._call(node, args, kwargs)
        module: nn.Module = self.model.get_submodule(node.target) if node.target else self.model
        used = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return functional_call(module, {name: self.substitute(tensor) for name, tensor in used}, args, kwargs)

    def _advance(self, node: Node) -> None:
        try:
            super()._advance(node)
        except Exception:
            self._substitute_outputs(node, "needs the values of its inputs")

    @contextmanager
    def node_context(self, node: Node) -> Iterator[None]:
        """Enter the autograd modes of a node; parameters are not moved."""
        from gemini.ir.autograd_modes import RegionSwitch

        with RegionSwitch() as switch, torch.device(META), FusedAttention():
            if node.region is not None:
                switch.to(node.region)
            yield


def count_node(walk: MetaWalk, node: Node, flow: GradientFlow) -> tuple[NodeMemory, KernelCounts, KernelCounts, str]:
    """Return (memory, forward work, backward work, reason why only sizes are known)."""
    try:
        isolated = IsolatedNode(walk, node, flow)
        used = [walk.substitute(tensor) for tensor in flow.model_tensors[node.id]]
        with walk.node_context(node), LiveMemory() as watch:
            return (*count_isolated(isolated, watch, used), "")
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return (*estimate_from_sizes(walk.graph, node, flow), reason)


def estimate_from_sizes(graph: Graph, node: Node, flow: GradientFlow) -> tuple[NodeMemory, KernelCounts, KernelCounts]:
    """Return memory and work estimated from the sizes of inputs and outputs alone."""
    size = values_size(graph, node)
    made = sum(value_size(graph, ref) for ref in tensor_outputs(node))
    backward = memory_traffic(2 * size) if node.id in flow.active else KernelCounts()
    active = node.id in flow.active
    memory = NodeMemory(
        forward_peak=made / MB,
        backward_peak=(size + made) / MB if active else 0.0,
        saved_inputs=tuple(at for at, ref in enumerate(tensor_inputs(node)) if not _is_model_tensor(graph, ref))
        if active
        else (),
        aliases=(-1,) * len(node.outputs),
    )
    return memory, memory_traffic(size), backward


def _is_model_tensor(graph: Graph, ref: Any) -> bool:
    return graph.nodes[ref.node].kind in MODEL_TENSORS
