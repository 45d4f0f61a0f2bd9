"""Limits: what cannot be had is said before anything is searched, with what could be had instead."""

from __future__ import annotations

from gemini.capture.graph import Graph
from gemini.errors import PartitionError
from gemini.partition.problem import Problem


def check_limits(graph: Graph, problem: Problem) -> None:
    """Raise PartitionError where no partitioner could succeed."""
    working = [item for item in problem.items if item.ms > 0] or list(problem.items)
    if problem.nparts > len(working):
        raise PartitionError(_too_many(graph, problem, len(working)))


def _too_many(graph: Graph, problem: Problem, most: int) -> str:
    text = f"{graph.model_name} cannot be cut into {problem.nparts} parts: {most} is the most"
    if graph.is_whole:
        return f"{text}, because it had to be captured whole: {graph.blocks['']}\n    → train it on one device"
    largest = max(problem.items, key=lambda item: len(item.nodes))
    reasons = [f"{scope} stays whole: {reason}" for scope, reason in graph.blocks.items()]
    if len(largest.nodes) > 1:
        reasons.append(f"{len(largest.nodes)} nodes around {largest.name} cannot be separated")
    listed = "".join(f"\n  - {reason}" for reason in reasons[:8])
    return f"{text}{listed}\n    → ask for {most} parts or fewer, or capture with a greater depth"
