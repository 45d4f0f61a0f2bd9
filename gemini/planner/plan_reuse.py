"""Plan reuse across input sizes.

At another sequence length most models have a graph with the same nodes and different sizes. Its plan then reuses the
profile, stages and schedule of the earlier one; only capture and the micro-batch proof run again.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.planner.plan_request import PlanRequest
    from gemini.planner.step_plan import StepPlan

_MAX_RATIO = 4.0  # of the work, larger or smaller: beyond it other stages may be better


def find_equivalent_plan(request: PlanRequest, graph: Graph, micro_batches: int) -> tuple[StepPlan, float] | None:
    """Return an earlier plan for a graph with the same nodes, and the ratio of the work of this graph to its own."""
    for plan in request.earlier_plans:
        if plan.micro_batches == micro_batches and describe_nodes(plan.graph) == describe_nodes(graph):
            ratio = work_ratio(graph, plan.graph)
            if is_comparable(ratio):
                return plan, ratio
    return None


def work_ratio(graph: Graph, other: Graph) -> float:
    """Return the work of a graph relative to that of another with the same nodes: their sizes decide."""
    return _count_elements(graph) / max(_count_elements(other), 1)


def is_comparable(ratio: float) -> bool:
    """Return whether the stages of one size are good for another with this ratio of work."""
    return 1 / _MAX_RATIO <= ratio <= _MAX_RATIO


def describe_nodes(graph: Graph) -> Hashable:
    """Return a key that is equal for graphs with the same nodes, whatever their sizes."""
    return tuple(
        (
            (node.kind, node.target, node.name, tuple(node.dependencies), tuple(node.mutates)),
            (node.checkpoint, node.recomputed, node.random),
            tuple((key, meta.dtype, meta.requires_grad) for key, meta in node.outputs.items()),
        )
        for node in graph.nodes
    )


def _count_elements(graph: Graph) -> int:
    return sum(prod(meta.shape) for node in graph.nodes if not node.is_source for meta in node.outputs.values())
