"""The dynamic program finds the optimal straight pipeline and the expected replicated ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.errors import PartitionError
from gemini.partition import Options, Worker
from gemini.partition.pipedream.merged_items import merge_items
from gemini.partition.pipedream.pipedream_partitioner import partition_pipedream
from gemini.partition.pipedream.replicated import find_replicated, network_levels
from gemini.schedule.link_costs import Links
from tests.partition.random_graphs import chain, made
from tests.partition.shapes import problem_of


@settings(max_examples=40, deadline=None)
@given(times=st.lists(st.integers(0, 9), min_size=3, max_size=8), nparts=st.integers(1, 3))
def test_straight_pipes_are_the_best_of_all(times: list[int], nparts: int) -> None:
    problem = made([float(ms) for ms in times], chain(len(times)), nparts)
    found = partition_pipedream(problem)
    cuts = itertools.combinations(range(1, len(times)), nparts - 1)
    best = min(max(sum(times[a:b]) for a, b in itertools.pairwise((0, *inner, len(times)))) for inner in cuts)
    assert max(problem.loads([found.worker_of[stage] for stage in found.stage_of])) == best


def test_communication_hides_behind_computing_or_decides() -> None:
    """A cut that takes longer than every stage is avoided, a shorter one costs nothing."""
    problem = made([4.0, 1.0, 3.0], [(0, 1), (1, 2)], 2, links=Links(0.0, 1 << 20), micro_batches=1)
    values = (replace(problem.values[0], forward_mb=9.0), replace(problem.values[1], forward_mb=1.0))
    found = partition_pipedream(replace(problem, values=values))
    assert found.stage_of == (0, 0, 1)


def test_without_cost_everything_is_replicated() -> None:
    found = partition_pipedream(made([1.0, 2.0, 3.0], chain(3), 3))
    plan = found.facts["replicated"]
    assert plan["stages"] == [
        {"items": 3, "first": "layers.0.op", "last": "layers.2.op", "workers": [0, 1, 2]},
    ]
    assert plan["ms"] == pytest.approx(2.0)
    assert len(set(found.stage_of)) == 3  # the answer itself has one worker a stage


def test_large_weights_are_not_replicated() -> None:
    """Light weights with much work are replicated, heavy ones with little work get one worker."""
    problem = made([30.0, 10.0], chain(2), 4, links=Links(0.0, 1 << 20), micro_batches=1)
    items = (replace(problem.items[0], parameters=("light",)), replace(problem.items[1], parameters=("heavy",)))
    problem = replace(
        problem,
        items=items,
        parameters_mb={"light": 0.001, "heavy": 1000.0},
        trainable=frozenset({"light", "heavy"}),
    )
    ms, stages = find_replicated(merge_items(problem, 64))
    assert [stage.workers for stage in stages] == [(0, 1, 2), (3,)]
    assert ms == pytest.approx(10.0, rel=0.01)


def test_machines_are_found_in_the_table_of_links() -> None:
    near = tuple(tuple(0.1 if a // 2 == b // 2 else 5.0 for a in range(4)) for b in range(4))
    inner, outer = network_levels(Links(near, 0), 4)
    assert (inner.count, outer.count) == (2, 2)
    assert inner.latency < outer.latency
    assert [network.count for network in network_levels(Links(1.0, 0), 4)] == [4]


def test_levels_share_out_all_workers() -> None:
    near = tuple(tuple(0.1 if a // 2 == b // 2 else 5.0 for a in range(4)) for b in range(4))
    problem = problem_of("stack", 4, Options(links=Links(near, 1 << 20)))
    _, stages = find_replicated(merge_items(problem, 32))
    assert sorted(worker for stage in stages for worker in stage.workers) == [0, 1, 2, 3]
    assert [stage.begin for stage in stages[1:]] == [stage.end for stage in stages[:-1]]


def test_chunks_take_turns() -> None:
    found = partition_pipedream(made([1.0] * 12, chain(12), 2, chunks=3))
    assert found.worker_of == (0, 1, 0, 1, 0, 1)


def test_rows_merge_the_lightest() -> None:
    row = merge_items(made([0.0, 0.0, 5.0, 0.0, 5.0, 0.0], chain(6), 2), 3)
    assert row.size == 3
    assert sorted(item.ms for item in row.problem.items) == [0.0, 5.0, 5.0]


def test_says_what_does_not_fit() -> None:
    problem = made([1.0] * 4, chain(4), 2, workers=(Worker(1.0, 1.0), Worker(1.0, 1.0)))
    items = tuple(replace(item, saved_own_mb=10.0) for item in problem.items)
    with pytest.raises(PartitionError, match="fit the memory of the workers"):
        partition_pipedream(replace(problem, items=items))
