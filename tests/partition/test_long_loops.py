"""Long loops: items are whole iterations, few per worker; shorter loops are items per node."""

from __future__ import annotations

import pytest
import torch

from gemini.capture import capture
from gemini.ir.graph import Graph
from gemini.partition import Options, partition
from gemini.partition.problem_builder import build_problem
from tests.codegen.cutting import flat_profile
from tests.codegen.repeated_steps import CellLoop


def _graph(turns: int) -> Graph:
    return capture(CellLoop(), (torch.randn(2, turns),), {})


@pytest.mark.parametrize("turns", [64, 150, 300])
def test_items_are_whole_iterations(turns: int) -> None:
    graph = _graph(turns)
    items = build_problem(graph, flat_profile(graph), 2, Options()).items
    calls = [[graph.nodes[node].target for node in item.nodes] for item in items]
    loops = [found for found in calls if "cell" in found]
    assert all(found == ["cell", "head"] * (len(found) // 2) for found in loops)
    assert sum(len(found) for found in loops) == 2 * turns
    assert len(loops) <= 128


def test_a_short_loop_has_an_item_per_node() -> None:
    graph = _graph(40)
    items = build_problem(graph, flat_profile(graph), 2, Options()).items
    assert all(len(item.nodes) == 1 for item in items)


def test_pins_may_separate_the_nodes_of_an_iteration() -> None:
    graph = _graph(80)
    problem = build_problem(graph, flat_profile(graph), 2, Options(pins={"cell": 0, "head": 1}))
    assert all(len(item.nodes) == 1 for item in problem.items)


def test_stages_end_between_iterations() -> None:
    graph = _graph(150)
    made = partition(graph, flat_profile(graph), 2)
    for nodes in made.stages:
        calls = [graph.nodes[node].target for node in nodes if graph.nodes[node].kind == "module"]
        assert calls == ["cell", "head"] * (len(calls) // 2)
