"""Whole step: forward and backward of the model, timed for comparison with the sum of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemini.autograd_engine import accumulate
from gemini.ir.call_binding import ModelCall
from gemini.ir.encode import decode, tensors
from gemini.ir.graph import Graph
from gemini.profiling.graph_walk import GraphWalk
from gemini.profiling.measured_device import Device


class WholeStep:
    """A training step without the optimizer."""

    def __init__(self, graph: Graph, device: Device, inputs: dict[int, torch.Tensor], call: ModelCall | None) -> None:
        self.graph, self.device, self.inputs, self.call = graph, device, inputs, call
        self.model = graph.bound_model()
        self.host_ms: list[tuple[float, float]] = []  # of the calling thread, forward and backward
        self.waits_ms: list[float] = []  # of the calling thread, for the device at the end

    def run(self) -> float:
        """Run and time one step (ms). Gradients are allocated anew and stay until `drop`, as in training."""
        self.drop()
        forward, now = self._forward(), self.device.now_ms

        def step() -> None:
            begin = now()
            output = forward()
            middle = now()
            run_backward(output)
            self.host_ms.append((middle - begin, now() - middle))

        ms = self.device.time_step(step)
        self.waits_ms.append(max(0.0, ms - sum(self.host_ms[-1])))
        return ms

    def discard_readings(self) -> None:
        """Discard all readings."""
        self.host_ms, self.waits_ms = [], []

    def drop(self) -> None:
        """Drop the gradients of the last step."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def _forward(self) -> Callable[[], Any]:
        """Return the forward call on new inputs: of the model where its arguments are known, else of the graph."""
        if self.call is not None:
            args, kwargs = self.call.arguments()
            return lambda: self.model(*args, **kwargs)
        walk = DifferentiableWalk(self.graph, self.inputs, self.device.torch_device)
        return walk.output


class DifferentiableWalk(GraphWalk):
    """A walk that builds autograd history, as the model would."""

    def _source(self, node: Any) -> torch.Tensor:
        found = super()._source(node)
        return found.requires_grad_(self.inputs[node.id].requires_grad) if node.kind == "input" else found

    def _advance(self, node: Any) -> None:
        with self.node_context(node):
            args, kwargs = self.decode_arguments(node, self.read)
            self.results[node.id] = self._call(node, args, kwargs)
        if any(source == "arg" for source, _ in node.outputs):
            self.arguments[node.id] = (args, kwargs)

    def output(self) -> Any:
        """Run all nodes and return the model output."""
        self.visit(lambda *_: None)
        return decode(self.graph.result, self.read)


def run_backward(output: Any) -> None:
    """Run backward from the scalars of an output, or from all its tensors where there are none."""
    found = [tensor for _, tensor in tensors(output) if tensor.requires_grad and tensor.grad_fn is not None]
    roots = list({id(tensor): tensor for tensor in found}.values())
    roots = [tensor for tensor in roots if tensor.numel() == 1] or roots
    if roots:
        accumulate(roots, [torch.ones_like(root) for root in roots])
