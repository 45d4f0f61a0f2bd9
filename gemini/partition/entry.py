"""`partition(graph, profile, nparts)`: the way in. Build the problem, solve it, put the stages in order, check."""

from __future__ import annotations

import time

import networkx as nx

from gemini.capture.graph import Graph
from gemini.errors import PartitionError
from gemini.partition.building import build_problem
from gemini.partition.limits import check_limits
from gemini.partition.options import Options
from gemini.partition.partition import Partition
from gemini.partition.problem import Problem
from gemini.partition.registry import Assignment, find_partitioner
from gemini.profiling.result import Profile


def partition(
    graph: Graph, profile: Profile, nparts: int, partitioner: str = "exact", options: Options | None = None
) -> Partition:
    """Cut a profiled graph into stages for `nparts` workers."""
    options = options or Options()
    solve = find_partitioner(partitioner)
    problem = build_problem(graph, profile, nparts, options)
    check_limits(graph, problem)
    began = time.perf_counter()
    found = solve(problem)
    stages, workers = in_order(problem, found)
    facts = {**found.facts, "seconds": round(time.perf_counter() - began, 3)}
    made = Partition(graph.model_name, partitioner, nparts, stages, workers, options.to_json(), facts)
    made.validate(graph)
    return made


def in_order(problem: Problem, found: Assignment) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Nodes and worker of each stage, numbered so that values flow forward; empty stages are left out."""
    quotient = nx.DiGraph()
    quotient.add_nodes_from(found.stage_of)
    ends = ((found.stage_of[edge.source], found.stage_of[edge.target]) for edge in problem.edges)
    quotient.add_edges_from(pair for pair in ends if pair[0] != pair[1])
    first: dict[int, int] = {}
    for at, stage in enumerate(found.stage_of):
        first.setdefault(stage, at)
    try:
        order = list(nx.lexicographical_topological_sort(quotient, key=lambda stage: first[stage]))
    except nx.NetworkXUnfeasible as error:
        circle = [stage for stage, _ in nx.find_cycle(quotient)]
        raise PartitionError(f"stages {circle} need each other: this is a fault of the partitioner") from error
    nodes: dict[int, list[int]] = {stage: [] for stage in order}
    for item, stage in zip(problem.items, found.stage_of, strict=True):
        nodes[stage] += item.nodes
    return tuple(tuple(sorted(nodes[stage])) for stage in order), tuple(found.worker_of[stage] for stage in order)
