"""Rollback: a cheap snapshot of the state that a run of the stages may change.

Buffers of traced modules are written by nodes of the graph only: where no node writes, they are not copied. For most
models the snapshot is the state of the generators, and nothing more.
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
    """The state that runs of one graph may change."""

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self._copies: list[torch.Tensor] = []
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
        """Return the buffers and arguments that may be written."""
        held = [buffer for module in self.owners for buffer in module._buffers.values() if buffer is not None]
        held += [tensor for _, tensor in tensors(bound)] if self.inputs else []
        return [tensor for tensor in held if tensor.device.type != "meta"]

    def take_copies(self, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for copies, that of an earlier run where it fits; the caller owns it."""
        copies, self._copies = self._copies, []
        fits = len(copies) == len(wanted) and all(
            one.shape == other.shape and one.dtype is other.dtype and one.device == other.device
            for one, other in zip(copies, wanted, strict=True)
        )
        return copies if fits else [torch.empty_like(tensor) for tensor in wanted]

    def return_copies(self, copies: list[torch.Tensor]) -> None:
        """Retain memory for the next run."""
        self._copies = copies


class Rollback:
    """The state before a run."""

    def __init__(self, changeable: MutableState, bound: dict[str, Any]) -> None:
        self.changeable = changeable
        self.generators = GeneratorStates()
        self.attributes = [AttributeSnapshot(block) for block in changeable.blocks]
        self.tensors = changeable.tensors(bound)
        self.saved = changeable.take_copies(self.tensors)
        self._copy(self.tensors, self.saved)

    def undo(self) -> None:
        """Restore the state."""
        for attributes in self.attributes:
            attributes.restore()
        self._copy(self.saved, [tensor.data for tensor in self.tensors])
        self.generators.restore()

    def discard(self) -> None:
        """Discard the snapshot after a successful run."""
        self.changeable.return_copies(self.saved)

    @staticmethod
    def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Copy grouped by dtype and device: a GPU copies each group in one kernel."""
        kinds: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for source, target in zip(sources, targets, strict=True):
            froms, tos = kinds.setdefault((source.dtype, source.device), ([], []))
            froms.append(source)
            tos.append(target)
        with torch.no_grad():
            for froms, tos in kinds.values():
                torch._foreach_copy_(tos, froms)
