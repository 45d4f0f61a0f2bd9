"""`partition(graph, profile, nparts)`: the way in. Build the problem, solve it, put the stages in order, check."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gemini.errors import PartitionError
from gemini.ir.graph import Graph
from gemini.partition.assignment import Partition
from gemini.partition.infeasible import check_limits, check_memory, explained
from gemini.partition.partition_options import Options
from gemini.partition.partition_problem import Problem
from gemini.partition.problem_builder import build_problem
from gemini.partition.registry import Assignment, find_partitioner
from gemini.profiling.profile_result import Profile

Stages = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]  # members of each stage, and its worker


def partition(
    graph: Graph, profile: Profile, nparts: int, partitioner: str = "exact", options: Options | None = None
) -> Partition:
    """Cut a profiled graph into stages for `nparts` workers."""
    options = options or Options()
    solve = find_partitioner(partitioner)
    problem = build_problem(graph, profile, nparts, options)
    check_limits(graph, problem)
    began = time.perf_counter()
    try:
        found = solve(problem)
        items, workers = items_in_order(problem, found)
        check_memory(problem, items, workers)
    except PartitionError as error:
        raise explained(error, graph, profile, problem) from error
    facts = {**found.facts, "seconds": round(time.perf_counter() - began, 3)}
    stages = _nodes(problem, items)
    made = Partition(graph.model_name, partitioner, nparts, stages, workers, options.to_json(), facts)
    made.validate(graph)
    return made


def in_order(problem: Problem, found: Assignment) -> Stages:
    """Nodes and worker of each stage, numbered so that values flow forward; empty stages are left out."""
    items, workers = items_in_order(problem, found)
    return _nodes(problem, items), workers


def items_in_order(problem: Problem, found: Assignment) -> Stages:
    """Items and worker of each stage, likewise."""
    faults = list(_faults(problem, found))
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults[:8])
        raise PartitionError(f"the partitioner's answer is not what was asked:\n{listed}")
    members: dict[int, list[int]] = {stage: [] for stage in _order(problem, found)}
    for item, stage in enumerate(found.stage_of):
        members[stage].append(item)
    return tuple(map(tuple, members.values())), tuple(found.worker_of[stage] for stage in members)


def _nodes(problem: Problem, stages: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(node for item in items for node in problem.items[item].nodes)) for items in stages)


def _faults(problem: Problem, found: Assignment) -> Iterator[str]:
    """What is wrong with an answer, whoever gave it."""
    if len(found.stage_of) != len(problem.items):
        yield f"{len(found.stage_of)} items have a stage, of {len(problem.items)}"
        return
    wrong = sorted(
        stage
        for stage in set(found.stage_of)
        if stage not in range(len(found.worker_of)) or found.worker_of[stage] not in range(problem.nparts)
    )
    if wrong:
        yield f"stages {wrong[:5]} have no worker of the {problem.nparts}"
        return
    for item, stage in zip(problem.items, found.stage_of, strict=True):
        if item.pin not in (None, found.worker_of[stage]):
            yield f"{item.name} is pinned to part {item.pin} and was put in part {found.worker_of[stage]}"
    used = [found.worker_of[stage] for stage in set(found.stage_of)]
    if problem.options.mixed is False and len(set(used)) < len(used):
        yield f"{len(used)} stages on {len(set(used))} workers, where each was to have one (mixed=False)"


def _order(problem: Problem, found: Assignment) -> list[int]:
    """The stages in use, in an order in which values flow forward: that of their numbers, where it is one."""
    import networkx as nx

    ends = [(found.stage_of[edge.source], found.stage_of[edge.target]) for edge in problem.edges]
    if all(before <= after for before, after in ends):
        return sorted(set(found.stage_of))
    quotient = nx.DiGraph()
    quotient.add_nodes_from(found.stage_of)
    quotient.add_edges_from(pair for pair in ends if pair[0] != pair[1])
    first: dict[int, int] = {}
    for at, stage in enumerate(found.stage_of):
        first.setdefault(stage, at)
    try:
        return list(nx.lexicographical_topological_sort(quotient, key=lambda stage: first[stage]))
    except nx.NetworkXUnfeasible as error:
        circle = [stage for stage, _ in nx.find_cycle(quotient)]
        raise PartitionError(f"stages {circle} need each other: this is a fault of the partitioner") from error
