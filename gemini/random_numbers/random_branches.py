"""Branches on random numbers: predict the branches of a step before it runs.

    for layer in self.layers:
        if torch.rand(()) < 0.1:      the outcome follows from the generator state and from all random
            continue                  numbers before it, such as dropout masks
        x = layer(x)

A graph is one path through such code. The random numbers of the whole batch are generated in order up to the last one
that determines a branch; then the generator is restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.batch_analysis.precompute import random_guards
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.ir.node import Guard
from gemini.ir.pytree import expr_refs
from gemini.random_numbers.random_ops import aten, draw_whole
from gemini.random_numbers.rng_recorder import RandomOp, RandomOpPattern


class NodeDraw(NamedTuple):
    """A random op of a node: the growth of its shape with the batch, and the call."""

    pattern: RandomOpPattern
    draw: RandomOp


def _nodes_read_by(graph: Graph, guard: Guard) -> set[int]:
    found: set[int] = set()
    waiting = [ref.node for ref in expr_refs(guard.expr)]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += graph.nodes[at].dependencies
    return found


class UnpredictableBranch(Exception):
    """A branch whose outcome only the run itself determines."""


class RandomBranches:
    """The branches of one graph that depend on random numbers."""

    def __init__(self, graph: Graph, made: Mapping[int, Sequence[NodeDraw]]) -> None:
        self.graph, self.made = graph, made
        self.guards = random_guards(graph)
        self.needed = {at for guard in self.guards for at in _nodes_read_by(graph, guard)}
        for at in self.needed:
            node = graph.nodes[at]
            if not node.is_source and (node.kind != "op" or node.mutates or node.after):
                raise UnpredictableBranch(f"a branch on random numbers depends on {node.name} ({self.guards[0].line})")
        last = max(at for at in self.needed if graph.nodes[at].random)
        self.order = sorted(self.needed | {at for at in made if at <= last})
        self._advance: dict[tuple[int, int, int], bool] = {}

    def first_changed(self, model: nn.Module, bound: dict[str, Any], samples: int) -> Guard | None:
        """Return the first branch in which a call would deviate from the graph; None if it follows the graph."""
        execution = Execution(self.graph, model, bound)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), RegionSwitch() as regions:
                for at in self.order:
                    node = self.graph.nodes[at]
                    if at in self.needed:
                        if node.region is not None and not node.is_source:
                            regions.to(node.region)
                        execution.step(node)
                    else:
                        self._pass(at, samples)
                for guard in self.guards:
                    execution.check((guard,))
        except GuardBroken as broken:
            return broken.guard or self.guards[0]
        except NodeFailed:
            return self.guards[0]
        return None

    def _pass(self, node: int, samples: int) -> None:
        """Advance the generator as the random ops of a node would."""
        for number, (pattern, draw) in enumerate(self.made[node]):
            key = (node, number, samples)
            if key not in self._advance:
                self._advance[key] = _advances_equally(pattern, draw, samples)
            _draw(pattern, draw, 1 if self._advance[key] else samples)


def _advances_equally(pattern: RandomOpPattern, draw: RandomOp, samples: int) -> bool:
    """Return whether any number of Bernoulli samples advances the generator equally, as some libraries do."""
    if draw.function is not aten.bernoulli_.float or pattern.dim is None:
        return False
    states = []
    for count in (1, samples):
        with torch.random.fork_rng(devices=[]):
            _draw(pattern, draw, count)
            states.append(torch.get_rng_state())
    return bool(torch.equal(*states))


def _draw(pattern: RandomOpPattern, draw: RandomOp, samples: int) -> None:
    draw_whole(draw.function, draw.args, dict(draw.kwargs), pattern.of(samples), pattern.order)
