"""Undo: what a run of the stages may change, saved cheaply, so that a run that did not fit leaves nothing behind.

Buffers of modules that capture opened are only written by nodes of the graph: where no node writes, they are not
copied. So for most models a snapshot is the states of the generators, and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gemini.capture.graph import Graph
from gemini.capture.state import Attributes, Generators
from gemini.capture.values import tensors


class Changeable:
    """What the runs of one graph may change; found once."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self.model = model
        written = {ref.node for node in graph.nodes for ref in node.mutates}
        self.inputs = bool(written) and bool(graph.inputs)
        glue = set(graph.validity.glue) if graph.validity is not None else set()
        self.owners = [
            module
            for name, module in model.named_modules()
            if any(buffer is not None for buffer in module._buffers.values()) and (written or name not in glue)
        ]
        self.blocks = [
            model.get_submodule(node.target) if node.target else model
            for node in graph.compute_nodes
            if node.kind == "block"
        ]

    def buffers(self) -> Iterator[torch.Tensor]:
        """The buffers that may be written, as they are now."""
        for module in self.owners:
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)


class Undo:
    """The state before a run."""

    def __init__(self, changeable: Changeable, bound: dict[str, Any]) -> None:
        self.generators = Generators()
        self.attributes = [Attributes(block) for block in changeable.blocks]
        held = [*changeable.buffers(), *((t for _, t in tensors(bound)) if changeable.inputs else ())]
        self.tensors = [(tensor, tensor.detach().clone()) for tensor in held if tensor.device.type != "meta"]

    def undo(self) -> None:
        """Put everything back."""
        for attributes in self.attributes:
            attributes.restore()
        with torch.no_grad():
            for tensor, saved in self.tensors:
                if tensor._version or not torch.equal(tensor, saved):
                    tensor.data.copy_(saved)
        self.generators.restore()
