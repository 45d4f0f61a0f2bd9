"""Partition results are validated, ordered, and survive serialization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemini.errors import ArtifactError, PartitionError
from gemini.partition import Options, Partition, Worker, partition
from gemini.partition.baseline import assign_equal_layers, find_layers
from gemini.partition.entry import order_items, order_stages
from gemini.partition.partition_problem import Edge, Item, Problem, Value
from gemini.partition.partitioner_comparison import partition_equal_layers
from gemini.partition.registry import Assignment, find_partitioner
from tests.partition.shapes import captured, problem_of


@pytest.mark.parametrize("model", ["stack", "translator", "u"])
@pytest.mark.parametrize("nparts", [1, 2, 4, 7])
def test_every_node_is_in_one_stage_and_values_flow_forward(model: str, nparts: int) -> None:
    graph, costs = captured(model)
    made = partition(graph, costs, nparts)
    assert sorted(set(made.workers)) == list(range(nparts))
    assert sorted(node for nodes in made.stages for node in nodes) == [node.id for node in graph.compute_nodes]
    for node in graph.compute_nodes:
        assert all(made.stage_of.get(one, 0) <= made.stage_of[node.id] for one in node.dependencies)
    assert made.nstages == nparts or made.is_mixed
    assert not partition(graph, costs, nparts, options=Options(mixed=False)).is_mixed


def test_a_partition_survives_a_file(tmp_path: Path) -> None:
    graph, costs = captured("stack")
    options = Options(workers=(Worker(), Worker(2.0), Worker()), noise=0.01)
    made = partition(graph, costs, 3, options=options)
    made.save(tmp_path / "partition.json")
    loaded = Partition.load(tmp_path / "partition.json")
    assert loaded == Partition.from_json(json.loads(json.dumps(made.to_json())))
    assert loaded.stages == made.stages
    assert Options.from_json(loaded.options) == options
    loaded.validate(graph)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 9}', '{"format": 1, "stages": 3}'])
def test_files_that_hold_something_else_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises((PartitionError, ArtifactError)):
        Partition.load(tmp_path / "x.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        Partition.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("stages", "workers", "said"),
    [
        (((0,), (0,)), (0, 1), "stage 1 repeats nodes [0]"),
        (((0,), ()), (0, 1), "stages [1] are empty"),
        (((1, 0),), (0,), "not in ascending order"),
        (((0,), (1,)), (0,), "2 stages, but workers for 1"),
        (((0,), (1,)), (0, 2), "stages on workers [0, 2] of 2"),
    ],
)
def test_a_wrong_partition_cannot_be_made(stages: Any, workers: Any, said: str) -> None:
    with pytest.raises(PartitionError) as caught:
        Partition("M", "exact", 2, stages, workers)
    assert said in str(caught.value)


def test_a_partition_of_another_graph_does_not_fit() -> None:
    graph, costs = captured("stack")
    other, _ = captured("u")
    with pytest.raises(PartitionError, match="does not fit the graph of U"):
        partition(graph, costs, 2).validate(other)


def test_stages_against_the_flow_are_found() -> None:
    graph, costs = captured("stack")
    made = partition(graph, costs, 2)
    turned = Partition(made.model, made.partitioner, 2, made.stages[::-1], made.workers)
    with pytest.raises(PartitionError, match="of the later stage 1"):
        turned.validate(graph)


# ── what partitioners answer ───────────────────────────────────────────────────────────────────────────────────────
def chain(pins: tuple[int | None, ...] = (None,) * 4, **options: Any) -> Problem:
    items = tuple(Item(f"i{at}", (at,), 1, 1, 1, pin=pin) for at, pin in enumerate(pins))
    return Problem(items, tuple(Edge(at, at + 1, at) for at in range(3)), (Value(1, 1),) * 3, 2, Options(**options))


def test_stages_are_put_in_order_and_empty_ones_left_out() -> None:
    assert order_stages(chain(), Assignment((5, 5, 2, 2), (0,) * 2 + (1,) * 3 + (0,))) == (((0, 1), (2, 3)), (0, 1))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Assignment((0, 1, 0, 1), (0, 1)), "depend on each other"),
        (Assignment((0, 0, 1), (0, 1)), "3 of 4 items have a stage"),
        (Assignment((0, 0, 1, 1), (0, 2)), "stages [1] have no valid worker"),
        (Assignment((0, 0, 1, 7), (0, 1)), "stages [7] have no valid worker"),
        (Assignment((0, 1, 2, 2), (0, 1, 0)), "3 stages on 2 workers"),
    ],
)
def test_wrong_answers_are_refused(answer: Assignment, said: str) -> None:
    with pytest.raises(PartitionError) as caught:
        order_items(chain(mixed=False), answer)
    assert said in str(caught.value)


def test_unknown_partitioners_list_the_known_ones() -> None:
    with pytest.raises(
        PartitionError, match=r"unknown partitioner 'exakt'\n    → did you mean 'exact'\? choose from exact"
    ):
        find_partitioner("exakt")


# ── the baseline ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_equal_layers() -> None:
    graph, costs = captured("stack")
    assert find_layers(graph) == [f"layers.{at}" for at in range(12)]
    made = partition_equal_layers(graph, costs, 4)
    for at, nodes in enumerate(made.stages):
        inside = {scope for node in nodes for scope in graph.nodes[node].scope if scope.count(".") == 1}
        assert {f"layers.{3 * at + one}" for one in range(3)} <= inside


@pytest.mark.parametrize("model", ["stack", "translator", "u"])
@pytest.mark.parametrize("nparts", [2, 4])
def test_exact_is_never_slower_than_equal_layers(model: str, nparts: int) -> None:
    graph, costs = captured(model)
    problem = problem_of(model, nparts)
    found, base = find_partitioner("exact")(problem), assign_equal_layers(graph, problem)
    part_of = [found.worker_of[stage] for stage in found.stage_of]
    assert problem.bottleneck(part_of) <= problem.bottleneck(base.stage_of) * (1 + 1e-9)
    partition_equal_layers(graph, costs, nparts).validate(graph)


def test_too_few_layers_for_the_baseline() -> None:
    graph, _ = captured("stack")
    with pytest.raises(PartitionError, match="12 layers for 13 stages"):
        assign_equal_layers(graph, problem_of("stack", 13))
