"""The `exact` partitioner agrees with exhaustive search."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings

from gemini.errors import PartitionError
from gemini.partition.exact.contiguous import find_fastest, find_narrowest
from gemini.partition.exact.device_order import slot_orders
from gemini.partition.exact.exact_partitioner import search
from gemini.partition.exact.prefix_costs import SegmentCosts
from gemini.partition.item_orders import item_orders
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment
from tests.partition.small_problems import contiguous, fits, problems

ROUNDING = 1e-7


def stages_of(problem: Problem, found: Assignment) -> list[list[int]]:
    count = max(found.stage_of) + 1
    return [[item for item, stage in enumerate(found.stage_of) if stage == at] for at in range(count)]


def part_of(found: Assignment) -> list[int]:
    return [found.worker_of[stage] for stage in found.stage_of]


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_bottleneck_is_the_least_of_all_contiguous_cuts(problem: Problem) -> None:
    tried = list(contiguous(problem, list(item_orders(problem).values())))
    lines = [SegmentCosts(problem, order) for order in item_orders(problem).values()]
    found = [
        cuts for line in lines for seats in slot_orders(problem) if (cuts := find_fastest(line, seats)) is not None
    ]
    if not tried:
        assert not found
        return
    assert min(cuts.ms for cuts in found) == pytest.approx(min(ms for ms, _ in tried), rel=ROUNDING)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_no_contiguous_cut_within_the_slack_is_narrower(problem: Problem) -> None:
    tried = list(contiguous(problem, list(item_orders(problem).values())))
    if not tried:
        return
    limit = min(ms for ms, _ in tried) * (1 + problem.options.slack)
    lines = [SegmentCosts(problem, order) for order in item_orders(problem).values()]
    found = [cuts for line in lines for seats in slot_orders(problem) if (cuts := find_narrowest(line, seats, limit))]
    assert min(cuts.nbytes for cuts in found) / (1 << 20) == pytest.approx(
        min(mb for ms, mb in tried if ms <= limit * (1 + ROUNDING))
    )


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_answer_is_a_valid_partition_within_the_slack(problem: Problem) -> None:
    tried = list(contiguous(problem, list(item_orders(problem).values())))
    try:
        found = search(problem)
    except PartitionError:
        assert not tried
        return
    stages = stages_of(problem, found)
    assert all(stages)
    assert len(stages) == problem.nparts
    assert sorted(item for items in stages for item in items) == list(range(len(problem.items)))
    assert all(found.stage_of[edge.source] <= found.stage_of[edge.target] for edge in problem.edges)
    assert fits(problem, stages, found.worker_of)
    if tried:
        limit = min(ms for ms, _ in tried) * (1 + problem.options.slack)
        assert max(problem.times(part_of(found))) <= limit * (1 + ROUNDING)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_the_same_problem_has_the_same_answer(problem: Problem) -> None:
    with contextlib.suppress(PartitionError):
        assert search(problem) == search(problem)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_orders_keep_values_flowing_forward(problem: Problem) -> None:
    for order in item_orders(problem).values():
        place = {item: at for at, item in enumerate(order)}
        assert sorted(order) == list(range(len(problem.items)))
        assert all(place[edge.source] < place[edge.target] for edge in problem.edges)
