"""Meta runs: a graph walked on tensors without contents, to count work and memory at any size.

Nothing is computed and nothing is allocated. Parameters are stood in for by meta tensors while a module runs; the
model is not touched. A node that needs contents (it reads a value, or writes outside torch) is known by the sizes
of its arguments and results only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from gemini.ir.graph import Graph
from gemini.ir.node import MODULES, Node
from gemini.profiling.flop_count import Work, bytes_only
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import Walk
from gemini.profiling.measured_device import MB
from gemini.profiling.node_memory import LiveMemory, NodeMemory
from gemini.profiling.node_runner import Isolation, examine
from gemini.profiling.node_tensors import HELD, tensor_inputs, tensor_outputs, value_size, values_size

META = torch.device("meta")


class MetaWalk(Walk):
    """A walk on meta tensors; a node that cannot run so yields tensors of the sizes it had when captured."""

    def __init__(self, graph: Graph, inputs: dict[int, torch.Tensor]) -> None:
        super().__init__(graph, inputs, META)
        self.copies: dict[int, torch.Tensor] = {}

    def _source(self, node: Node) -> torch.Tensor:
        return self.stand_in_for(super()._source(node))

    def stand_in_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor, the same one each time."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self.copies:
            copy = tensor.detach().to(META)
            self.copies[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
        return self.copies[id(tensor)]

    def call_of(self, node: Node, args: Any, kwargs: Any) -> Callable[[], Any]:
        """A call of a node with stand-ins for the tensors of the model."""
        return lambda: self._call(node, args, kwargs)

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        if not self.away or node.kind not in MODULES:
            return super()._call(node, args, kwargs)
        module: nn.Module = self.model.get_submodule(node.target) if node.target else self.model
        held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return functional_call(module, {name: self.stand_in_for(tensor) for name, tensor in held}, args, kwargs)

    def _advance(self, node: Node) -> None:
        try:
            super()._advance(node)
        except Exception:
            self._stand_in(node, "needs the contents of its inputs")

    @contextmanager
    def place(self, node: Node) -> Iterator[None]:
        """The modes of a node; parameters stay where they are."""
        from gemini.ir.autograd_modes import RegionSwitch

        with RegionSwitch() as switch, torch.device(META):
            if node.region is not None:
                switch.to(node.region)
            yield


def count(walk: MetaWalk, node: Node, flow: GradientFlow) -> tuple[NodeMemory, Work, Work, str]:
    """(memory, forward work, backward work, reason why only sizes are known)."""
    try:
        isolation = Isolation(walk, node, flow)
        held = [walk.stand_in_for(tensor) for tensor in flow.held[node.id]]
        with walk.place(node), LiveMemory() as watch:
            return (*examine(isolation, watch, held), "")
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return (*sizes_only(walk.graph, node, flow), reason)


def sizes_only(graph: Graph, node: Node, flow: GradientFlow) -> tuple[NodeMemory, Work, Work]:
    """What the sizes of inputs and outputs alone tell."""
    size = values_size(graph, node)
    made = sum(value_size(graph, ref) for ref in tensor_outputs(node))
    backward = bytes_only(2 * size) if node.id in flow.active else Work()
    active = node.id in flow.active
    memory = NodeMemory(
        forward_peak=made / MB,
        backward_peak=(size + made) / MB if active else 0.0,
        saved_inputs=tuple(at for at, ref in enumerate(tensor_inputs(node)) if not _held(graph, ref)) if active else (),
        aliases=(-1,) * len(node.outputs),
    )
    return memory, bytes_only(size), backward


def _held(graph: Graph, ref: Any) -> bool:
    return graph.nodes[ref.node].kind in HELD
