"""Undo: what a run of the stages may change, saved cheaply, so that a run that did not fit leaves nothing behind.

Buffers of modules that capture opened are only written by nodes of the graph: where no node writes, they are not
copied. So for most models a snapshot is the states of the generators, and nothing more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemini.ir.encode import tensors
from gemini.ir.graph import Graph
from gemini.snapshot.model_state import AttributeSnapshot
from gemini.snapshot.rng_snapshot import GeneratorStates


class MutableState:
    """What the runs of one graph may change; found once."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self._room: list[torch.Tensor] = []
        written = {ref.node for node in graph.nodes for ref in node.mutates}
        self.inputs = bool(written) and bool(graph.inputs)
        glue = set(graph.validity.glue) if graph.validity is not None else set()
        is_open = not written and not any(node.kind == "call" for node in graph.nodes)  # functions may call modules
        self.owners = [
            module
            for name, module in model.named_modules()
            if any(buffer is not None for buffer in module._buffers.values()) and not (is_open and name in glue)
        ]
        self.blocks = [
            model.get_submodule(node.target) if node.target else model
            for node in graph.compute_nodes
            if node.kind == "block"
        ]

    def tensors(self, bound: dict[str, Any]) -> list[torch.Tensor]:
        """Buffers and arguments that may be written, as they are now."""
        held = [buffer for module in self.owners for buffer in module._buffers.values() if buffer is not None]
        held += [tensor for _, tensor in tensors(bound)] if self.inputs else []
        return [tensor for tensor in held if tensor.device.type != "meta"]

    def take_room(self, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
        """Room for copies: that of an earlier run where it fits. Whoever takes it has it for itself."""
        room, self._room = self._room, []
        fits = len(room) == len(wanted) and all(
            one.shape == other.shape and one.dtype is other.dtype and one.device == other.device
            for one, other in zip(room, wanted, strict=True)
        )
        return room if fits else [torch.empty_like(tensor) for tensor in wanted]

    def give_room(self, room: list[torch.Tensor]) -> None:
        """Keep room for the next run."""
        self._room = room


class Rollback:
    """The state before a run."""

    def __init__(self, changeable: MutableState, bound: dict[str, Any]) -> None:
        self.changeable = changeable
        self.generators = GeneratorStates()
        self.attributes = [AttributeSnapshot(block) for block in changeable.blocks]
        self.tensors = changeable.tensors(bound)
        self.saved = changeable.take_room(self.tensors)
        self._copy(self.tensors, self.saved)

    def undo(self) -> None:
        """Put everything back."""
        for attributes in self.attributes:
            attributes.restore()
        self._copy(self.saved, [tensor.data for tensor in self.tensors])
        self.generators.restore()

    def forget(self) -> None:
        """The run went well: its snapshot is not needed any more."""
        self.changeable.give_room(self.saved)

    @staticmethod
    def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """All at once: of tensors of one kind a GPU copies any number in one kernel, of mixed ones each by itself."""
        kinds: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for source, target in zip(sources, targets, strict=True):
            froms, tos = kinds.setdefault((source.dtype, source.device), ([], []))
            froms.append(source)
            tos.append(target)
        with torch.no_grad():
            for froms, tos in kinds.values():
                torch._foreach_copy_(tos, froms)
