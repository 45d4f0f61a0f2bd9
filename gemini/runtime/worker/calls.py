"""Calls: a worker runs units forward, keeps their graphs, and runs them backward when asked.

The inputs of a call are leaves here: the controller's autograd continues on its side. A graph is kept until the
controller drops the call, so that a second backward (`retain_graph=True`) finds it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gemini.capture.regions import Region
from gemini.runtime.generator import get_state, set_state
from gemini.runtime.protocol import Backward, Forward, Gradients, Outputs
from gemini.runtime.transport.packing import Classes, pack, unpack
from gemini.runtime.worker.audit import Audit


class Entrance(torch.autograd.Function):  # type: ignore[misc]
    """An input as the unit sees it: not a leaf, which autograd would not let it write to."""

    @staticmethod
    def forward(_: Any, leaf: torch.Tensor) -> torch.Tensor:
        """The same memory."""
        return leaf.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The same gradient."""
        return gradient


@dataclass
class Kept:
    """The graph of one call."""

    inputs: list[torch.Tensor]
    parameters: list[nn.Parameter]
    outputs: list[Any]  # the places of differentiable outputs in the graph, not their contents


class Unit:
    """A module of the model as a worker has it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.audit = Audit(module)

    def follow(self, state: tuple[tuple[bool, ...], tuple[bool, ...]] | None) -> None:
        """Take over training flags and frozen parameters from the controller."""
        if state is None:
            return
        training, trained = state
        for module, flag in zip(self.modules, training, strict=True):
            module.training = flag
        for parameter, flag in zip(self.parameters, trained, strict=True):
            parameter.requires_grad_(flag)


class Calls:
    """All units of a worker and the graphs that may still be asked for."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.units: dict[int, Unit] = {}
        self.kept: dict[int, Kept] = {}
        self.region = Region.current()

    def install(self, units: dict[int, nn.Module]) -> None:
        """Take over modules."""
        self.units.update({number: Unit(module) for number, module in units.items()})

    def drop(self, calls: list[int]) -> None:
        """Forget the graphs of calls."""
        for call in calls:
            self.kept.pop(call, None)

    def forward(self, request: Forward) -> Outputs:
        """Run a unit; raises Refusal where that cannot be done from afar."""
        unit = self.units[request.unit]
        unit.follow(request.state)
        leaves = request.tensors
        inputs = [Entrance.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]
        args, kwargs = unpack(request.body, inputs, self.classes)
        if request.region is not None:
            self.region = Region(*request.region)
        set_state(request.generator)
        with ExitStack() as stack:
            self.region.enter(stack, Region.current())
            with unit.audit.watching(args, kwargs, inputs):
                result = unit.module(*args, **kwargs)
        drawn = get_state()
        body, tensors = pack(result, self.classes)
        place = {id(tensor): at for at, tensor in enumerate(inputs)}
        same = [place.get(id(tensor)) for tensor in tensors]
        graded = [tensor.requires_grad and at is None for tensor, at in zip(tensors, same, strict=True)]
        if any(graded):
            trained = [parameter for parameter in unit.parameters if parameter.requires_grad]
            edges = [get_gradient_edge(tensor) if flag else None for tensor, flag in zip(tensors, graded, strict=True)]
            self.kept[request.number] = Kept(leaves, trained, edges)
        sent = [tensor.detach() if at is None else None for tensor, at in zip(tensors, same, strict=True)]
        return Outputs(request.number, body, same, graded, b"" if drawn == request.generator else drawn, sent)

    def backward(self, request: Backward) -> Gradients:
        """The gradients that were asked for; None where an input or parameter took no part."""
        kept = self.kept[request.call]
        wanted = [kept.inputs[at] for at in request.inputs] + [kept.parameters[at] for at in request.parameters]
        pairs = [
            (output, gradient)
            for output, gradient in zip(kept.outputs, request.tensors, strict=True)
            if gradient is not None and output is not None
        ]
        if not pairs or not wanted:
            return Gradients(request.number, [None] * len(wanted))
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)
        return Gradients(request.number, list(found))
