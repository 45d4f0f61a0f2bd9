"""`partition(graph, profile, nparts)`: build the problem, solve it, order the stages, validate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from gemini.errors import PartitionError
from gemini.ir.graph import Graph
from gemini.partition.assignment import Partition
from gemini.partition.idle_stages import absorb_idle_stages
from gemini.partition.infeasible import check_limits, check_memory, explain_failure
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
    if options.noise is None:
        options = replace(options, noise=round(profile.noise, 4))
    problem = build_problem(graph, profile, nparts, options)
    check_limits(graph, problem)
    began = time.perf_counter()
    try:
        found = absorb_idle_stages(problem, solve(problem))
        items, workers = order_items(problem, found)
        check_memory(problem, items, workers)
    except PartitionError as error:
        raise explain_failure(error, graph, profile, problem) from error
    facts = {**found.facts, "seconds": round(time.perf_counter() - began, 3)}
    stages = _nodes_of_stages(problem, items)
    made = Partition(graph.model_name, partitioner, nparts, stages, workers, options.to_json(), facts)
    made.validate(graph)
    return made


def order_stages(problem: Problem, found: Assignment) -> Stages:
    """Return the nodes and the worker of each stage, in topological order without empty stages."""
    items, workers = order_items(problem, found)
    return _nodes_of_stages(problem, items), workers


def order_items(problem: Problem, found: Assignment) -> Stages:
    """Return the items and the worker of each stage, in topological order without empty stages."""
    faults = list(_faults(problem, found))
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults[:8])
        raise PartitionError(f"the partitioner returned an invalid assignment:\n{listed}")
    members: dict[int, list[int]] = {stage: [] for stage in _topological_order(problem, found)}
    for item, stage in enumerate(found.stage_of):
        members[stage].append(item)
    return tuple(map(tuple, members.values())), tuple(found.worker_of[stage] for stage in members)


def _nodes_of_stages(problem: Problem, stages: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(node for item in items for node in problem.items[item].nodes)) for items in stages)


def _faults(problem: Problem, found: Assignment) -> Iterator[str]:
    """Report the faults of an assignment."""
    if len(found.stage_of) != len(problem.items):
        yield f"{len(found.stage_of)} of {len(problem.items)} items have a stage"
        return
    wrong = sorted(
        stage
        for stage in set(found.stage_of)
        if stage not in range(len(found.worker_of)) or found.worker_of[stage] not in range(problem.nparts)
    )
    if wrong:
        yield f"stages {wrong[:5]} have no valid worker; workers are 0 … {problem.nparts - 1}"
        return
    for item, stage in zip(problem.items, found.stage_of, strict=True):
        if item.pin not in (None, found.worker_of[stage]):
            yield f"{item.name} is pinned to part {item.pin} and was assigned to part {found.worker_of[stage]}"
    used = [found.worker_of[stage] for stage in set(found.stage_of)]
    if problem.options.mixed is False and len(set(used)) < len(used):
        yield f"{len(used)} stages on {len(set(used))} workers contradict one stage per worker (mixed=False)"


def _topological_order(problem: Problem, found: Assignment) -> list[int]:
    """Return the stages in use in topological order: the order of their numbers, where it is one."""
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
        cycle = [stage for stage, _ in nx.find_cycle(quotient)]
        raise PartitionError(f"stages {cycle} depend on each other: this is a fault of the partitioner") from error
