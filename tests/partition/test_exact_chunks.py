"""Several chunks per worker agree with exhaustive search, or with the ideal where that is infeasible."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

import gemini.partition.exact.chunked as chunked_module
from gemini.errors import PartitionError
from gemini.partition.exact.exact_partitioner import search
from gemini.partition.item_orders import item_orders
from gemini.partition.partition_options import Options, Worker
from gemini.partition.partition_problem import Edge, Item, Problem, Value
from gemini.partition.registry import Assignment
from gemini.schedule.link_costs import Links
from tests.partition.small_problems import fits_looped, looped, problems


def check_valid(problem: Problem, found: Assignment) -> float:
    """The bottleneck of a valid answer."""
    count = len(found.worker_of)
    stages = [[item for item, stage in enumerate(found.stage_of) if stage == at] for at in range(count)]
    assert all(stages)
    assert found.worker_of == tuple(range(problem.nparts)) * (count // problem.nparts)
    assert all(found.stage_of[edge.source] <= found.stage_of[edge.target] for edge in problem.edges)
    assert fits_looped(problem, stages, found.worker_of)
    return max(problem.times([found.worker_of[stage] for stage in found.stage_of]))


@settings(max_examples=80, deadline=None)
@given(problems(most=8, parts=2, chunks=2))
def test_the_bottleneck_is_the_least_of_all_looped_cuts(problem: Problem) -> None:
    chunks = min(2, len(problem.items) // problem.nparts)
    if chunks < 2 or problem.nparts == 1:
        return
    tried = list(looped(problem, list(item_orders(problem).values()), chunks))
    try:
        found = search(problem)
    except PartitionError:
        assert not tried
        return
    assert found.facts["optimal"]
    least = min(ms for ms, _ in tried)
    assert check_valid(problem, found) <= least * (1 + problem.options.slack) * (1 + 1e-7)
    assert found.facts["bound_ms"] <= least * (1 + 1e-6) + 1e-6


@settings(max_examples=80, deadline=None)
@given(problems(most=8, parts=2, chunks=2, limited=False))
def test_the_search_gives_valid_answers_and_honest_bounds(problem: Problem) -> None:
    chunks = min(2, len(problem.items) // problem.nparts)
    if chunks < 2 or problem.nparts == 1:
        return
    tried = list(looped(problem, list(item_orders(problem).values()), chunks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_module, "_FEW", 0)
        try:
            found = search(problem)
        except PartitionError:
            return
    least = min(ms for ms, _ in tried)
    assert check_valid(problem, found) >= least * (1 - 1e-9)
    assert found.facts["bound_ms"] <= least * (1 + 1e-6) + 1e-6


def chain(count: int, nparts: int, **options: object) -> Problem:
    draw = random.Random(3)
    items = tuple(Item(f"i{at}", (at,), draw.choice((0.1, 1.0, 2.0, 7.0)), 1, 1) for at in range(count))
    edges = tuple(Edge(at, at + 1, at) for at in range(count - 1))
    values = tuple(Value(draw.randint(1, 9), 1.0) for _ in range(count - 1))
    return Problem(items, edges, values, nparts, Options(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [2, 3, 5])
@pytest.mark.parametrize("workers", [(), tuple(Worker(speed) for speed in (1.0, 2.0, 1.0, 0.5))])
def test_large_problems_come_close_to_the_ideal(chunks: int, workers: tuple[Worker, ...]) -> None:
    problem = chain(600, 4, chunks=chunks, workers=workers, slack=0.0)
    found = search(problem)
    assert check_valid(problem, found) <= problem.ideal_ms * 1.01
    assert search(problem) == found


def test_bytes_become_fewer_within_the_slack() -> None:
    tight, loose = chain(300, 4, chunks=2, slack=0.0), chain(300, 4, chunks=2, slack=0.1)
    assert search(loose).facts["cut_mb"] < search(tight).facts["cut_mb"]


def test_chunks_with_links_and_pins() -> None:
    plain = chain(200, 4, chunks=2, links=Links(0.01, 1 << 20))
    items = tuple(
        Item(i.name, i.nodes, i.ms, 1, 1, pin={10: 0, 110: 0, 199: 3}.get(at)) for at, i in enumerate(plain.items)
    )
    problem = Problem(items, plain.edges, plain.values, 4, plain.options)
    assert check_valid(problem, search(problem)) <= problem.ideal_ms * 1.6


def test_fewer_chunks_where_there_are_fewer_items() -> None:
    assert search(chain(5, 2, chunks=4)).facts["chunks"] == 2
