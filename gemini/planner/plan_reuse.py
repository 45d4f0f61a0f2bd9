"""Reuse: a plan for calls of another length, where the model does the same with them.

Most models go the same way at every length: the graphs have the same nodes, and differ in sizes. What was found for
one, times, stages and schedule, then serves the other; only the graph is captured anew, and the proof made on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.planner.step_plan import StepPlan

_MOST = 4.0  # times as much work, or as little: beyond it other stages may be better
_earlier: ContextVar[tuple[StepPlan, ...]] = ContextVar("earlier", default=())


@contextmanager
def reusing(plans: Sequence[StepPlan]) -> Iterator[None]:
    """Plans that may serve for what is planned inside."""
    before = _earlier.set(tuple(plans))
    try:
        yield
    finally:
        _earlier.reset(before)


def find_like(graph: Graph, micro_batches: int) -> tuple[StepPlan, float] | None:
    """An earlier plan for a graph with the same nodes, and how many times as much this one computes."""
    for plan in _earlier.get():
        if plan.micro_batches == micro_batches and _nodes(plan.graph) == _nodes(graph):
            ratio = _entries(graph) / max(_entries(plan.graph), 1)
            if 1 / _MOST <= ratio <= _MOST:
                return plan, ratio
    return None


def _nodes(graph: Graph) -> Hashable:
    return tuple(
        (
            (node.kind, node.target, node.name, tuple(node.dependencies), tuple(node.mutates)),
            (node.checkpoint, node.random),
            tuple((key, meta.dtype, meta.requires_grad) for key, meta in node.outputs.items()),
        )
        for node in graph.nodes
    )


def _entries(graph: Graph) -> int:
    return sum(prod(meta.shape) for node in graph.nodes if not node.is_source for meta in node.outputs.values())
