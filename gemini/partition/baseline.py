"""Baseline: an equal number of layers per stage, as pipelines are commonly cut by hand.

Layers are the outermost numbered modules of a model (`encoder.layer.3`, `layer2.0`). Items before the first layer join
its stage, items after the last layer join the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.errors import PartitionError
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.ir.node import Node

NAME = "equal-layers"


def assign_equal_layers(graph: Graph, problem: Problem) -> Assignment:
    """Assign each stage the same number of layers, the first stages one more where the count does not divide."""
    layers = find_layers(graph)
    if len(layers) < problem.nparts:
        raise PartitionError(
            f"{graph.model_name} has {len(layers)} layers for {problem.nparts} stages\n"
            f"    → request {max(len(layers), 1)} parts or fewer, or a partitioner that cuts inside layers"
        )
    layers_of_item = [[_layer_of_node(graph.nodes[node]) for node in item.nodes] for item in problem.items]
    stage_of = _assign(problem, layers, layers_of_item)
    return Assignment(tuple(stage_of), tuple(range(problem.nparts)), {"method": NAME, "layers": len(layers)})


def find_layers(graph: Graph) -> Sequence[str]:
    """Return the layers of a model in execution order; a layer that runs twice counts once."""
    return list(dict.fromkeys(layer for node in graph.compute_nodes if (layer := _layer_of_node(node))))


def equal_layer_stages(problem: Problem) -> list[int] | None:
    """Return the baseline's stage of each item by item names alone; None where layers are too few or pins forbid it."""
    layer_of = [_layer_of_name(item.name) for item in problem.items]
    layers = [layer for layer in dict.fromkeys(layer_of) if layer]
    if len(layers) < problem.nparts:
        return None
    stage_of = _assign(problem, layers, [[layer] for layer in layer_of])
    if any(item.pin not in (None, stage) for item, stage in zip(problem.items, stage_of, strict=True)):
        return None
    return stage_of


def _assign(problem: Problem, layers: Sequence[str], layers_of_item: Sequence[Sequence[str]]) -> list[int]:
    """Return the stage of each item: the last of its layers' stages, but no earlier than its predecessors'."""
    stage_of_layer = {layer: at * problem.nparts // len(layers) for at, layer in enumerate(layers)}
    stage_of: list[int] = []
    for item, own in enumerate(layers_of_item):
        before = [stage_of[source] for source in problem.predecessors[item]]
        stage_of.append(max([0, *(stage_of_layer[layer] for layer in own if layer in stage_of_layer), *before]))
    return stage_of


def _layer_of_node(node: Node) -> str:
    """Return the outermost numbered module that contains or is a node."""
    own = (node.target,) if node.kind in ("module", "block") else ()
    numbered = (scope for scope in (*node.scope, *own) if scope.rpartition(".")[2].isdigit())
    return next(numbered, "")


def _layer_of_name(name: str) -> str:
    parts = name.split(".")
    numbered = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if numbered is None else ".".join(parts[: numbered + 1])
