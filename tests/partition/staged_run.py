"""A graph run in stages that share nothing: every stage has its own copy of the model and of the call, and gets copies
of what other stages made. What workers do, in a few lines and one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.call_binding import bind
from gemini.ir.encode import decode, follow
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution
from gemini.ir.pytree import Ref


class Stage(Execution):
    """The nodes of one stage."""

    def __init__(self, graph: Graph, model: nn.Module, call: Any, earlier: Sequence[Stage]) -> None:
        model = copy.deepcopy(model)
        super().__init__(graph, model, bind(model, *copy.deepcopy(call)))
        self.earlier = earlier
        self.nodes: set[int] = set()
        self.received: dict[Ref, Any] = {}

    def run_nodes(self, nodes: Sequence[int]) -> None:
        """Run some nodes in the order of the graph."""
        self.nodes = set(nodes)
        with RegionSwitch() as regions:
            for node in map(self.graph.nodes.__getitem__, sorted(nodes)):
                if node.region is not None:
                    regions.to(node.region)
                self.step(node)

    def _value(self, ref: Ref) -> Any:
        if self.graph.nodes[ref.node].is_source or ref.node in self.nodes:
            if ref.node not in self.results and self.graph.nodes[ref.node].is_source:
                self.step(self.graph.nodes[ref.node])
            return super()._value(ref)
        if ref not in self.received:
            owner = next(stage for stage in self.earlier if ref.node in stage.nodes)
            value = super(Stage, owner)._value(ref)
            self.received[ref] = value.clone() if isinstance(value, torch.Tensor) else value
        return self.received[ref]


def run_in_stages(graph: Graph, stages: Sequence[Sequence[int]], args: Any, kwargs: Any) -> tuple[Any, list[Stage]]:
    """The model's output, and the stages that made it."""
    ran: list[Stage] = []
    for nodes in stages:
        stage = Stage(graph, graph.bound_model(), (args, kwargs), tuple(ran))
        stage.run_nodes(nodes)
        ran.append(stage)
    last = ran[-1]
    return decode(graph.result, last.read), ran


__all__ = ["Stage", "follow", "run_in_stages"]
