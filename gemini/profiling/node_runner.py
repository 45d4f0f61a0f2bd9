"""Node runner: one node in isolation, on its real inputs, forward and backward.

    value ──detach──► tensor that requires grad ──► node ──► outputs ◄── gradients, one per reader
                                ▲                                            │
                                └───────────────── backward ─────────────────┘

Gradients are returned, never accumulated: the `.grad` of parameters is left alone. Each output receives as many
gradients as it has readers, so that their sum is part of backward, as in a step. Detached inputs keep nothing alive:
between forward and backward only tensors saved by autograd are alive, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from gemini.autograd_engine import Found, accumulate, differentiate, edge_of
from gemini.ir.encode import follow
from gemini.ir.node import Node
from gemini.ir.pytree import Ref
from gemini.profiling.detach import TOKEN, arm_backward_timer, detach_with_grad
from gemini.profiling.flop_count import KernelCounts, WorkCounter
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import GraphWalk
from gemini.profiling.measured_device import MemoryWatch
from gemini.profiling.node_memory import NodeMemory, SavedTensors
from gemini.profiling.node_tensors import MODEL_TENSORS, tensor_outputs

Gradients = list[torch.Tensor]


@dataclass(frozen=True)
class GradientOutput:
    """A tensor produced or written by a node that receives gradients."""

    ref: Ref
    edge: GradientEdge
    readers: int
    like: tuple[torch.Size, torch.dtype, torch.device]
    owner: torch.Tensor | None = None  # keeps the edge alive where it has no other owner

    def ones(self) -> torch.Tensor:
        """Return a gradient of ones."""
        shape, dtype, device = self.like
        return torch.ones(shape, dtype=dtype, device=device)


class IsolatedNode:
    """One run of one node, detached from the rest of the graph.

    With `copies`, inputs that the node writes in place are copied first, so that it can run more than once.
    """

    def __init__(self, walk: GraphWalk, node: Node, flow: GradientFlow, *, copies: bool = True) -> None:
        self.walk, self.node, self.flow, self.copies = walk, node, flow, copies
        self.inputs: dict[Ref, Any] = {}
        self.starts: dict[Ref, GradientEdge] = {}  # gradient edges of inputs
        self.args, self.kwargs = walk.decode_arguments(node, self._read)
        self.forward: Callable[[], Any] = walk.make_call(node, self.args, self.kwargs)

    def _read(self, form: Any) -> Any:
        if not isinstance(form, Ref):
            return self.walk.read(form)
        if form not in self.inputs:
            self.inputs[form] = self._input(form)
        return self.inputs[form]

    def _input(self, ref: Ref) -> Any:
        value = self.walk.read(ref)
        source = self.walk.graph.nodes[ref.node]
        if not isinstance(value, torch.Tensor) or source.kind in MODEL_TENSORS:
            return value
        meta = source.outputs.get((ref.source, ref.path))
        found = value.detach()
        if meta is not None and meta.requires_grad and (found.is_floating_point() or found.is_complex()):
            found = detach_with_grad(found)
            self.starts[ref] = edge_of(found)
        return found.clone() if self.copies and ref in self.node.mutates else found

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def backward(self, result: Any) -> NodeBackward | None:
        """Return the backward of a result; None where the node has none."""
        if self.node.id not in self.flow.active:
            return None
        grad_outputs = list(self._grad_outputs(result))
        if not grad_outputs:
            return None
        if self.node.checkpoint.endswith("reentrant"):  # its recomputation is not part of the autograd graph
            used = [self.walk.substitute(tensor) for tensor in self.flow.model_tensors[self.node.id]]
            return AccumulatingBackward(grad_outputs, self.starts, [tensor for tensor in used if tensor.requires_grad])
        return NodeBackward(grad_outputs, self.starts, self._ends(grad_outputs))

    def _ends(self, grad_outputs: list[GradientOutput]) -> list[torch.Tensor]:
        """Return the model tensors that receive gradients; memoized, since they are the same in every pass."""
        memo = self.flow.trained if self.walk.device.type != "meta" else {}
        if self.node.id not in memo:
            known = {id(self.walk.substitute(tensor)) for tensor in self.flow.model_tensors[self.node.id]}
            found = find_leaves([grad_output.edge for grad_output in grad_outputs])
            memo[self.node.id] = [end for end in found if isinstance(end, nn.Parameter) or id(end) in known]
        return memo[self.node.id]

    def _grad_outputs(self, result: Any) -> Iterator[GradientOutput]:
        """Yield every tensor the node produced or wrote, with the number of gradients it receives."""
        readers = self.flow.readers(self.node)
        refs = tensor_outputs(self.node)
        seen: list[Any] = []
        for ref, count in zip(refs, readers, strict=False):
            yield from self._grad_output(ref, self.output(result, ref), count, seen)
        for ref, count in zip(self.node.mutates, readers[len(refs) :], strict=True):
            yield from self._grad_output(ref, self.inputs.get(ref), count, seen)

    def _grad_output(self, ref: Ref, tensor: Any, readers: int, seen: list[Any]) -> Iterator[GradientOutput]:
        if not readers or not isinstance(tensor, torch.Tensor) or not tensor.requires_grad or tensor.grad_fn is None:
            return
        if not any(tensor is one for one in seen):
            seen.append(tensor)
            edge = edge_of(tensor)
            owner = tensor if edge in self.starts.values() else None  # the node returns its input
            yield GradientOutput(ref, edge, readers, (tensor.shape, tensor.dtype, tensor.device), owner)

    def output(self, result: Any, ref: Ref) -> Any:
        """Return the tensor of a result, or None where it is not reachable from the result."""
        where: Any = {"ret": result, "arg": (self.args, self.kwargs)}.get(ref.source)
        if ref.source not in ("ret", "arg"):
            return None
        try:
            return follow(where, ref.path)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None

    def outputs(self, result: Any) -> list[Any]:
        """Return the tensors of a result by position; None where one is not reachable from the result."""
        return [self.output(result, ref) for ref in tensor_outputs(self.node)]


class NodeBackward:
    """The backward of a node that has run: from gradients of its outputs to those of inputs and parameters."""

    def __init__(
        self, grad_outputs: list[GradientOutput], starts: dict[Ref, GradientEdge], ends: list[torch.Tensor]
    ) -> None:
        self.grad_outputs, self.starts, self.ends = grad_outputs, starts, ends

    def ones(self) -> list[Gradients]:
        """Return, for every output, one gradient of ones per reader."""
        return [[grad_output.ones()] * grad_output.readers for grad_output in self.grad_outputs]

    def call(
        self, gradients: Sequence[Gradients], sums: dict[int, torch.Tensor], *, timed_in_thread: bool = False
    ) -> Callable[[], Found]:
        """Return a call that computes the gradients of inputs, in the order of `starts`, and adds those of parameters
        to `sums`, by identity; preparation happens outside the call. With `timed_in_thread`, `BACKWARD_TIMER` records
        its time in the autograd thread."""
        roots = tuple(
            grad_output.edge for grad_output, some in zip(self.grad_outputs, gradients, strict=True) for _ in some
        )
        flat = tuple(gradient for some in gradients for gradient in some)
        starts, ends = tuple(self.starts.values()), self.ends
        wanted = arm_backward_timer(roots, (*starts, *ends)) if timed_in_thread else (*starts, *ends)

        def run() -> Found:
            found = differentiate(roots, flat, wanted)
            for end, gradient in zip(ends, found[len(starts) : len(starts) + len(ends)], strict=True):
                if gradient is not None:
                    add_gradient(sums, end, gradient)
            return found[: len(starts)]

        return run


class AccumulatingBackward(NodeBackward):
    """For reentrant checkpoints, which do not support returned gradients; `.grad` is cleared afterwards."""

    def call(
        self, gradients: Sequence[Gradients], sums: dict[int, torch.Tensor], *, timed_in_thread: bool = False
    ) -> Callable[[], Found]:
        """As `NodeBackward.call`; gradients of inputs are captured by hooks."""
        if timed_in_thread:
            arm_backward_timer([grad_output.edge for grad_output in self.grad_outputs], ())
        roots = [grad_output.edge for grad_output, some in zip(self.grad_outputs, gradients, strict=True) for _ in some]
        flat = [gradient for some in gradients for gradient in some]
        captured: dict[int, torch.Tensor] = {}
        for at, edge in enumerate(self.starts.values()):
            edge.node.register_prehook(lambda found, at=at: captured.__setitem__(at, found[0]))

        def run() -> Found:
            accumulate(roots, flat)
            for end in self.ends:
                if end.grad is not None:
                    add_gradient(sums, end, end.grad)
                    end.grad = None
            return tuple(captured.get(at) for at in range(len(self.starts)))

        return run


def add_gradient(sums: dict[int, torch.Tensor], end: torch.Tensor, gradient: torch.Tensor) -> None:
    """Store the gradient of a parameter, or add it to a previous one into new memory, as autograd does."""
    before = sums.get(id(end))
    sums[id(end)] = gradient if before is None else before + gradient


def find_leaves(edges: Sequence[GradientEdge]) -> list[torch.Tensor]:
    """Return the leaf tensors reachable from gradient edges."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    stack: list[Any] = [edge.node for edge in edges]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if isinstance(variable, torch.Tensor) and variable is not TOKEN:
            found.append(variable)
        stack += [following for following, _ in function.next_functions]
    return found


def count_isolated(
    isolated: IsolatedNode, watch: MemoryWatch, used: list[torch.Tensor]
) -> tuple[NodeMemory, KernelCounts, KernelCounts]:
    """Run a node once, untimed; return (memory, forward work, backward work). `used` are the model tensors it uses."""
    saved = SavedTensors()
    with WorkCounter() as counter:
        with saved.recording():
            result = isolated.forward()
        forward_work, forward_peak = counter.take(), watch.peak_mb()
        memory = saved.summarize(_input_tensors(isolated), isolated.outputs(result), used)
        watch.restart()
        backward = isolated.backward(result)
        if backward is None:
            return replace(memory, forward_peak=forward_peak), forward_work, KernelCounts()
        gradients, sums = backward.ones(), zero_shared_gradients(isolated)
        counter.take()
        found = backward.call(gradients, sums)()
        memory = replace(memory, forward_peak=forward_peak, backward_peak=watch.peak_mb())
        del found, gradients, sums
        return memory, forward_work, counter.take()


def zero_shared_gradients(isolated: IsolatedNode) -> dict[int, torch.Tensor]:
    """Return zero gradients for parameters that a later node has already given a gradient."""
    shared = isolated.flow.shared.get(isolated.node.id, ())
    tensors = [isolated.walk.substitute(tensor) for tensor in shared]
    return {id(tensor): torch.zeros_like(tensor) for tensor in tensors}


def _input_tensors(isolated: IsolatedNode) -> list[Any]:
    """Return the inputs by position; None for model tensors."""
    nodes = isolated.walk.graph.nodes
    refs = isolated.flow.inputs[isolated.node.id]
    return [None if nodes[ref.node].kind in MODEL_TENSORS else isolated.inputs.get(ref) for ref in refs]
