"""The baseline: as many layers a stage as there are to share out, which is what people write by hand.

Layers are the numbered modules of a model, outermost ones (`encoder.layer.3`, `layer2.0`). What comes before the first
goes with it, what comes after the last with that one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.errors import PartitionError
from gemini.ir.graph import Graph
from gemini.ir.node import Node
from gemini.partition.assignment import Partition
from gemini.partition.partition_options import Options
from gemini.partition.partition_problem import Problem
from gemini.partition.problem_builder import build_problem
from gemini.partition.registry import Assignment
from gemini.profiling.profile_result import Profile

NAME = "equal-layers"


def equal_layers(graph: Graph, problem: Problem) -> Assignment:
    """The same number of layers in every stage, one more in the first ones where it does not divide."""
    layers = layers_of(graph)
    if len(layers) < problem.nparts:
        raise PartitionError(
            f"{graph.model_name} has {len(layers)} layers for {problem.nparts} stages\n"
            f"    → ask for {max(len(layers), 1)} or fewer, or for a partitioner that cuts inside layers"
        )
    stage_of_layer = {layer: at * problem.nparts // len(layers) for at, layer in enumerate(layers)}
    stage_of: list[int] = []
    for item in range(len(problem.items)):
        nodes = [graph.nodes[node] for node in problem.items[item].nodes]
        own = [stage_of_layer[layer] for node in nodes if (layer := _layer(node)) in stage_of_layer]
        before = [stage_of[one] for one in problem.predecessors[item]]
        stage_of.append(max([0, *own, *before]))
    return Assignment(tuple(stage_of), tuple(range(problem.nparts)), {"method": NAME, "layers": len(layers)})


def equal_layers_partition(graph: Graph, profile: Profile, nparts: int, options: Options | None = None) -> Partition:
    """The same as a partition."""
    from gemini.partition.entry import in_order

    options = options or Options()
    problem = build_problem(graph, profile, nparts, options)
    found = equal_layers(graph, problem)
    stages, workers = in_order(problem, found)
    return Partition(graph.model_name, NAME, nparts, stages, workers, options.to_json(), found.facts)


def layers_of(graph: Graph) -> Sequence[str]:
    """The layers of a model in the order in which they run; one that runs twice counts once."""
    found = dict.fromkeys(layer for node in graph.compute_nodes if (layer := _layer(node)))
    return list(found)


def _layer(node: Node) -> str:
    """The outermost numbered module that a node is in, or is."""
    own = (node.target,) if node.kind in ("module", "block") else ()
    numbered = (scope for scope in (*node.scope, *own) if scope.rpartition(".")[2].isdigit())
    return next(numbered, "")
