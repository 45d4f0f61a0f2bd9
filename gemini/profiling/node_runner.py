"""Isolation: a node alone, on its real inputs, forward and backward.

    real value ──cut──► tensor that takes a gradient ──► node ──► outlets ◄── gradients, one a reader
                                      ▲                                              │
                                      └────────────────── backward ──────────────────┘

Gradients are returned, never accumulated: the `.grad` of parameters stays as it is. Each output receives as many
gradients as it has readers, so that their sum is part of backward, as it is in a step. A cut keeps nothing alive:
between forward and backward only what autograd saves is held, as in a step.
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
from gemini.profiling.detach import TOKEN, cut, stamp
from gemini.profiling.flop_count import Work, WorkCounter
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import Walk
from gemini.profiling.measured_device import MemoryWatch
from gemini.profiling.node_memory import NodeMemory, SavedTensors
from gemini.profiling.node_tensors import HELD, tensor_outputs

Gradients = list[torch.Tensor]


@dataclass(frozen=True)
class Outlet:
    """A tensor that a node made or wrote and that receives gradients."""

    ref: Ref
    edge: GradientEdge
    readers: int
    like: tuple[torch.Size, torch.dtype, torch.device]
    owner: torch.Tensor | None = None  # keeps the edge alive where nothing else does

    def ones(self) -> torch.Tensor:
        """A gradient where no real one is at hand."""
        shape, dtype, device = self.like
        return torch.ones(shape, dtype=dtype, device=device)


class Isolation:
    """One run of one node, cut off from the rest.

    With `copies`, values that the node writes in place are copied first, so that it can run more than once.
    """

    def __init__(self, walk: Walk, node: Node, flow: GradientFlow, *, copies: bool = True) -> None:
        self.walk, self.node, self.flow, self.copies = walk, node, flow, copies
        self.given: dict[Ref, Any] = {}
        self.starts: dict[Ref, GradientEdge] = {}  # where gradients of inputs arrive
        self.args, self.kwargs = walk.decoded(node, self._read)
        self.forward: Callable[[], Any] = walk.call_of(node, self.args, self.kwargs)

    def _read(self, form: Any) -> Any:
        if not isinstance(form, Ref):
            return self.walk.read(form)
        if form not in self.given:
            self.given[form] = self._given(form)
        return self.given[form]

    def _given(self, ref: Ref) -> Any:
        value = self.walk.read(ref)
        source = self.walk.graph.nodes[ref.node]
        if not isinstance(value, torch.Tensor) or source.kind in HELD:
            return value
        meta = source.outputs.get((ref.source, ref.path))
        found = value.detach()
        if meta is not None and meta.requires_grad and (found.is_floating_point() or found.is_complex()):
            found = cut(found)
            self.starts[ref] = edge_of(found)
        return found.clone() if self.copies and ref in self.node.mutates else found

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────
    def backward(self, result: Any) -> Backward | None:
        """The backward pass of a result; None where the node takes no part in backward."""
        if self.node.id not in self.flow.active:
            return None
        outlets = list(self._outlets(result))
        if not outlets:
            return None
        if self.node.checkpoint == "reentrant":  # what it runs in backward is not part of its history
            held = [self.walk.stand_in_for(tensor) for tensor in self.flow.held[self.node.id]]
            return Accumulated(outlets, self.starts, [tensor for tensor in held if tensor.requires_grad])
        return Backward(outlets, self.starts, self._ends(outlets))

    def _ends(self, outlets: list[Outlet]) -> list[torch.Tensor]:
        """The tensors of the model that get gradients; found once, as each pass has the same."""
        memo = self.flow.ends if self.walk.device.type != "meta" else {}
        if self.node.id not in memo:
            known = {id(self.walk.stand_in_for(tensor)) for tensor in self.flow.held[self.node.id]}
            found = accumulated([outlet.edge for outlet in outlets])
            memo[self.node.id] = [end for end in found if isinstance(end, nn.Parameter) or id(end) in known]
        return memo[self.node.id]

    def _outlets(self, result: Any) -> Iterator[Outlet]:
        """Every tensor the node made or wrote, with the number of gradients it receives."""
        readers = self.flow.readers(self.node)
        refs = tensor_outputs(self.node)
        seen: list[Any] = []
        for ref, count in zip(refs, readers, strict=False):
            yield from self._outlet(ref, self.output(result, ref), count, seen)
        for ref, count in zip(self.node.mutates, readers[len(refs) :], strict=True):
            yield from self._outlet(ref, self.given.get(ref), count, seen)

    def _outlet(self, ref: Ref, tensor: Any, readers: int, seen: list[Any]) -> Iterator[Outlet]:
        if not readers or not isinstance(tensor, torch.Tensor) or not tensor.requires_grad or tensor.grad_fn is None:
            return
        if not any(tensor is one for one in seen):
            seen.append(tensor)
            edge = edge_of(tensor)
            owner = tensor if edge in self.starts.values() else None  # the node returns what it was given
            yield Outlet(ref, edge, readers, (tensor.shape, tensor.dtype, tensor.device), owner)

    def output(self, result: Any, ref: Ref) -> Any:
        """The tensor of a result, or None where it comes otherwise."""
        where: Any = {"ret": result, "arg": (self.args, self.kwargs)}.get(ref.source)
        if ref.source not in ("ret", "arg"):
            return None
        try:
            return follow(where, ref.path)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None

    def outputs(self, result: Any) -> list[Any]:
        """The tensors of a result, by position; None where one comes otherwise."""
        return [self.output(result, ref) for ref in tensor_outputs(self.node)]


class Backward:
    """The backward pass of a node that has run: from gradients of its outlets to those of inputs and parameters."""

    def __init__(self, outlets: list[Outlet], starts: dict[Ref, GradientEdge], ends: list[torch.Tensor]) -> None:
        self.outlets, self.starts, self.ends = outlets, starts, ends

    def ones(self) -> list[Gradients]:
        """For every outlet, a gradient a reader."""
        return [[outlet.ones()] * outlet.readers for outlet in self.outlets]

    def call(
        self, gradients: Sequence[Gradients], sums: dict[int, torch.Tensor], *, stamped: bool = False
    ) -> Callable[[], Found]:
        """A call that returns the gradients of inputs, in the order of `starts`; those of parameters are added to
        `sums`, by identity. Whatever need not be part of the call is done before. With `stamped`, `TURN` has the time
        that it took in the thread that ran it."""
        roots = tuple(outlet.edge for outlet, some in zip(self.outlets, gradients, strict=True) for _ in some)
        flat = tuple(gradient for some in gradients for gradient in some)
        starts, ends = tuple(self.starts.values()), self.ends
        wanted = stamp(roots, (*starts, *ends)) if stamped else (*starts, *ends)

        def run() -> Found:
            found = differentiate(roots, flat, wanted)
            for end, gradient in zip(ends, found[len(starts) : len(starts) + len(ends)], strict=True):
                if gradient is not None:
                    add(sums, end, gradient)
            return found[: len(starts)]

        return run


class Accumulated(Backward):
    """For reentrant checkpoints, which refuse to return gradients. `.grad` is emptied again."""

    def call(
        self, gradients: Sequence[Gradients], sums: dict[int, torch.Tensor], *, stamped: bool = False
    ) -> Callable[[], Found]:
        """As for any backward pass; gradients of inputs are caught on their way."""
        if stamped:
            stamp([outlet.edge for outlet in self.outlets], ())
        roots = [outlet.edge for outlet, some in zip(self.outlets, gradients, strict=True) for _ in some]
        flat = [gradient for some in gradients for gradient in some]
        caught: dict[int, torch.Tensor] = {}
        for at, edge in enumerate(self.starts.values()):
            edge.node.register_prehook(lambda found, at=at: caught.__setitem__(at, found[0]))

        def run() -> Found:
            accumulate(roots, flat)
            for end in self.ends:
                if end.grad is not None:
                    add(sums, end, end.grad)
                    end.grad = None
            return tuple(caught.get(at) for at in range(len(self.starts)))

        return run


def add(sums: dict[int, torch.Tensor], end: torch.Tensor, gradient: torch.Tensor) -> None:
    """Keep the gradient of a parameter, or add it to one that is there; to fresh memory, as autograd does."""
    before = sums.get(id(end))
    sums[id(end)] = gradient if before is None else before + gradient


def accumulated(edges: Sequence[GradientEdge]) -> list[torch.Tensor]:
    """The leaves that the history of some tensors leads to."""
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


def examine(isolation: Isolation, watch: MemoryWatch, held: list[torch.Tensor]) -> tuple[NodeMemory, Work, Work]:
    """(memory, forward work, backward work) of a node that uses the `held` tensors of the model."""
    saved = SavedTensors()
    with WorkCounter() as counter:
        with saved.recording():
            result = isolation.forward()
        forward_work, forward_peak = counter.take(), watch.peak_mb()
        memory = saved.summarize(_given(isolation), isolation.outputs(result), held)
        watch.restart()
        backward = isolation.backward(result)
        if backward is None:
            return replace(memory, forward_peak=forward_peak), forward_work, Work()
        gradients, sums = backward.ones(), given_already(isolation)
        counter.take()
        found = backward.call(gradients, sums)()
        memory = replace(memory, forward_peak=forward_peak, backward_peak=watch.peak_mb())
        del found, gradients, sums
        return memory, forward_work, counter.take()


def given_already(isolation: Isolation) -> dict[int, torch.Tensor]:
    """Gradients of parameters that a later node has given before this one adds its own."""
    shared = isolation.flow.shared.get(isolation.node.id, ())
    tensors = [isolation.walk.stand_in_for(tensor) for tensor in shared]
    return {id(tensor): torch.zeros_like(tensor) for tensor in tensors}


def _given(isolation: Isolation) -> list[Any]:
    """The inputs by position; None for tensors of the model."""
    nodes = isolation.walk.graph.nodes
    refs = isolation.flow.inputs[isolation.node.id]
    return [None if nodes[ref.node].kind in HELD else isolation.given.get(ref) for ref in refs]
