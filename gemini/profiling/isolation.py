"""Isolation: a node alone, on its real inputs, forward and backward.

    real value ──detach──► leaf that takes a gradient ──► node ──► outputs ◄── gradients, one a reader
                                       ▲                                            │
                                       └──────────────── backward ──────────────────┘

Gradients are returned, never accumulated: the `.grad` of parameters stays as it is. A value that the node writes in
place is copied first. Each output receives as many gradients as it has readers, so that their sum is measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gemini.capture.forms import Number, Ref
from gemini.capture.node import Node
from gemini.capture.values import follow
from gemini.profiling.device import Backward
from gemini.profiling.flow import GradientFlow, tensor_outputs
from gemini.profiling.held import HELD
from gemini.profiling.walk import Walk


class Isolation:
    """One run of one node, cut off from the rest."""

    def __init__(self, walk: Walk, node: Node, flow: GradientFlow) -> None:
        self.walk, self.node, self.flow = walk, node, flow
        self.leaves: dict[Ref, Any] = {}  # what the node is given
        self.starts: list[torch.Tensor] = []  # the leaves that take a gradient
        self.roots: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.sums: dict[int, torch.Tensor] = {}  # gradients that are there already
        self.args, self.kwargs = walk.decoded(node, self._read)

    def _read(self, form: Any) -> Any:
        if isinstance(form, Ref):
            if form not in self.leaves:
                self.leaves[form] = self._leaf(form)
            return self.leaves[form]
        if isinstance(form, Number):
            return self.walk.read(form)
        return self.walk.read(form)

    def _leaf(self, ref: Ref) -> Any:
        value = self.walk.read(ref)
        source = self.walk.graph.nodes[ref.node]
        if not isinstance(value, torch.Tensor) or source.kind in HELD:
            return value
        meta = source.outputs.get((ref.source, ref.path))
        leaf = value.detach()
        if meta is not None and meta.requires_grad and (leaf.is_floating_point() or leaf.is_complex()):
            leaf.requires_grad_(True)
            self.starts.append(leaf)
        return leaf.clone() if ref in self.node.mutates else leaf

    def forward(self) -> Any:
        """Run the node."""
        return self.walk.call(self.node, self.args, self.kwargs)

    def prepare(self, result: Any) -> Backward | None:
        """The backward pass of a result; None where the node takes no part in backward."""
        if self.node.id not in self.flow.active:
            return None
        for tensor, readers in self._outputs(result):
            if readers and isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                gradient = torch.ones_like(tensor, memory_format=torch.contiguous_format)
                self.roots += [tensor] * readers
                self.gradients += [gradient] * readers
        if not self.roots:
            return None
        shared = [self.walk.stand_in_for(tensor) for tensor in self.flow.shared.get(self.node.id, ())]
        self.sums = {id(tensor): torch.zeros_like(tensor) for tensor in shared}
        reentrant = self.node.checkpoint == "reentrant"
        ends = list({id(leaf): leaf for leaf in (*self.starts, *accumulated(self.roots))}.values())
        return self._accumulate if reentrant else lambda: self._differentiate(ends)

    def _outputs(self, result: Any) -> Iterator[tuple[Any, int]]:
        """Every tensor the node made or wrote, with the number of gradients it receives."""
        readers = self.flow.readers(self.node)
        refs = tensor_outputs(self.node)
        for ref, count in zip(refs, readers, strict=False):
            yield self._output(result, ref), count
        for ref, count in zip(self.node.mutates, readers[len(refs) :], strict=True):
            written = self.leaves.get(ref)
            if written is not None and not any(written is root for root in self.roots):
                yield written, count

    def _output(self, result: Any, ref: Ref) -> Any:
        where: Any = {"ret": result, "arg": (self.args, self.kwargs)}.get(ref.source)
        if ref.source not in ("ret", "arg"):
            return None
        try:
            return follow(where, ref.path)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None

    def _differentiate(self, ends: list[torch.Tensor]) -> Any:
        found = torch.autograd.grad(self.roots, ends, self.gradients, allow_unused=True)
        for end, gradient in zip(ends, found, strict=True):
            if gradient is not None and id(end) in self.sums:
                self.sums[id(end)].add_(gradient)
        return found

    def _accumulate(self) -> Any:
        """For reentrant checkpoints, which refuse to return gradients; `Unchanged` puts `.grad` back."""
        torch.autograd.backward(self.roots, self.gradients)

    def outputs(self, result: Any) -> list[Any]:
        """The tensors of a result, by position; None where one comes otherwise."""
        return [self._output(result, ref) for ref in tensor_outputs(self.node)]


def accumulated(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that the history of some tensors leads to."""
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    stack = [root.grad_fn for root in roots]
    while stack:
        function = stack.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        stack += [following for following, _ in function.next_functions]
    return found


Factory = Callable[[], Isolation]
__all__ = ["Factory", "Isolation", "accumulated"]
