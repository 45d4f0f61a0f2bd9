"""Cost assembly: from measurements of node classes to costs of nodes.

Sizes come from the graph. Positions in a measurement become graph values; a view has the value of its base, so that
memory saved by several nodes counts once.
"""

from __future__ import annotations

import torch
from torch import nn

from gemini.ir.node import Node, TensorMeta
from gemini.ir.pytree import Ref
from gemini.profiling.class_measurement import Measurement
from gemini.profiling.cost_signature import digest
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.measured_device import MB
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.node_tensors import MODEL_TENSORS, tensor_outputs


class CostAssembly:
    """Builds the costs of all nodes of a graph."""

    def __init__(self, flow: GradientFlow) -> None:
        self.flow, self.graph = flow, flow.graph
        self.model = self.graph.bound_model()
        self.values_mb: list[float] = []
        self.place: dict[Ref, int] = {}
        self.names = _tensor_names(self.model)
        self.parameters_mb = {name: _size_mb(tensor) for name, tensor in _named_tensors(self.model)}
        self.costs: list[NodeCost] = []
        for node in self.graph.nodes:
            if node.kind == "input":
                for ref in tensor_outputs(node):
                    self._new_value(ref)

    def add(self, node: Node, signature: str, pooled: int, found: Measurement, ms: tuple[float, float]) -> None:
        """Append the cost of a node; `ms` are its forward and backward time."""
        every, outputs = self.flow.inputs[node.id], tensor_outputs(node)
        inputs = [ref for ref in every if ref in self.place]
        self._place_outputs(outputs, every, found)
        memory = found.memory
        saved_refs = [every[at] for at in memory.saved_inputs if at < len(every)]
        saved_refs += [outputs[at] for at in memory.saved_outputs if at < len(outputs)]
        saved = tuple(sorted({self.place[ref] for ref in saved_refs if ref in self.place}))
        read = tuple(sorted({self.place[ref] for ref in inputs}))
        used = {self.names[id(t)]: t for t in self.flow.model_tensors[node.id] if id(t) in self.names}
        host = found.host_ms > found.device_ms
        forward, backward = (found.forward_host, found.backward_host) if host else (found.forward, found.backward)
        total = forward.ms + backward.ms
        noise = (forward.ms * forward.noise + backward.ms * backward.noise) / total if total else 0.0
        self.costs.append(
            NodeCost(
                id=node.id, name=node.name, kind=node.kind, node_class=digest(signature)[:12], pooled=pooled,
                forward_ms=ms[0], backward_ms=ms[1], noise=noise,
                samples=forward.samples, rejected=forward.rejected + backward.rejected,
                forward_peak_mb=memory.forward_peak, backward_peak_mb=memory.backward_peak,
                parameter_mb=sum(_size_mb(t) for t in used.values() if isinstance(t, nn.Parameter)),
                buffer_mb=sum(_size_mb(t) for t in used.values() if not isinstance(t, nn.Parameter)),
                input_mb=sum(self.values_mb[at] for at in read),
                output_mb=sum(_meta_mb(meta) for meta in node.outputs.values()),
                saved_mb=memory.saved_own + sum(self.values_mb[at] for at in saved),
                saved_own_mb=memory.saved_own,
                flops=found.forward_work.flops + found.backward_work.flops,
                moved_mb=(found.forward_work.nbytes + found.backward_work.nbytes) / MB,
                forward_flops=found.forward_work.flops, forward_moved_mb=found.forward_work.nbytes / MB,
                host_ms=found.host_ms, device_ms=found.device_ms,
                source=found.source, reason=found.reason,
                parameters=tuple(used), saved_values=saved, input_values=read,
                output_values=tuple(sorted({self.place[ref] for ref in outputs if ref in self.place})),
            )
        )  # fmt: skip

    def _place_outputs(self, outputs: list[Ref], inputs: list[Ref], found: Measurement) -> None:
        aliases = (*found.memory.aliases, *([-1] * len(outputs)))
        for ref, alias in zip(outputs, aliases, strict=False):
            target = inputs[alias] if 0 <= alias < len(inputs) else None
            if target is not None and self.graph.nodes[target.node].kind in MODEL_TENSORS:
                continue  # a view of a parameter takes no memory of its own
            if target is not None and target in self.place:
                self.place[ref] = self.place[target]
            else:
                self._new_value(ref)

    def _new_value(self, ref: Ref) -> None:
        meta = self.graph.nodes[ref.node].outputs[ref.source, ref.path]
        self.place[ref] = len(self.values_mb)
        self.values_mb.append(_meta_mb(meta))


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _tensor_names(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in _named_tensors(model)}


def _size_mb(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size() / MB)


def _meta_mb(meta: TensorMeta) -> float:
    return float(meta.numel * getattr(torch, meta.dtype).itemsize / MB)
