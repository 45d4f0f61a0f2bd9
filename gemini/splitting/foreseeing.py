"""Foreseeing: what is computed before a step, from its inputs and the operands of its tape: targets, masks, counts."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from gemini.capture.executor import Execution
from gemini.capture.forms import Ref
from gemini.capture.graph import Graph
from gemini.capture.regions import RegionSwitch
from gemini.capture.values import follow
from gemini.step.tape import Tape


class Foreseen:
    """The values of one step that shares are computed from, each computed when it is first asked for."""

    def __init__(self, graph: Graph, bound: dict[str, Any], tape: Tape, model: nn.Module | None = None) -> None:
        self.execution = Execution(graph, model or graph.bound_model(), bound)
        self.tape = tape

    def value(self, key: Hashable) -> torch.Tensor:
        """The whole-batch contents of a value."""
        if isinstance(key, Ref):
            self._run(key.node)
            found: torch.Tensor = follow(self.execution.results[key.node], key.path)
            return found
        assert isinstance(key, tuple)
        return self.tape.operands[key[1]]

    def _run(self, node: int) -> None:
        graph, done = self.execution.graph, self.execution.results
        needed: set[int] = set()
        waiting = [node]
        while waiting:
            index = waiting.pop()
            if index not in needed and index not in done:
                needed.add(index)
                waiting += graph.nodes[index].dependencies
        with torch.no_grad(), RegionSwitch() as regions:
            for index in sorted(needed):
                one = graph.nodes[index]
                if one.region is not None and not one.is_source:
                    regions.to(one.region)
                self.execution.step(one)
