"""A graph, its profile and options become a partition problem."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.ir.graph import Graph
from gemini.partition import Options, partition
from gemini.partition.partition_problem import ORDER, Problem
from gemini.partition.problem_builder import build_problem, find_nodes
from gemini.profiling import profile
from tests.partition.shapes import captured, problem_of


def items_of(problem: Problem, nodes: list[int]) -> set[int]:
    return {at for at, item in enumerate(problem.items) if set(item.nodes) & set(nodes)}


@pytest.mark.parametrize("model", ["stack", "translator", "u"])
def test_items_hold_every_node_once_in_an_order_in_which_values_flow_forward(model: str) -> None:
    graph, costs = captured(model)
    problem = problem_of(model, 2)
    assert sorted(node for item in problem.items for node in item.nodes) == [node.id for node in graph.compute_nodes]
    assert all(edge.source < edge.target for edge in problem.edges)
    assert sum(item.ms for item in problem.items) == pytest.approx(costs.forward_ms + costs.backward_ms)


def test_weights_of_times() -> None:
    _, costs = captured("stack")
    totals = {
        name: sum(item.ms for item in problem_of("stack", 2, Options(weight=weight, ratio=ratio)).items)
        for name, weight, ratio in (("f", "forward", 2.0), ("b", "backward", 2.0), ("both", "both", 2.0))
    }
    assert totals["f"] == pytest.approx(costs.forward_ms)
    assert totals["b"] == pytest.approx(2 * costs.backward_ms)
    assert totals["both"] == pytest.approx(costs.forward_ms + 2 * costs.backward_ms)


def test_recomputation_counts_forward_twice() -> None:
    _, costs = captured("stack")
    total = sum(item.ms for item in problem_of("stack", 2, Options(recompute=True)).items)
    assert costs.forward_ms + costs.backward_ms < total <= 2 * costs.forward_ms + costs.backward_ms + 1e-9


def test_scopes_that_stay_together_are_one_item() -> None:
    graph, _ = captured("stack")
    problem = problem_of("stack", 2, Options(uncut=("layers.3",), together=(("layers.5.feed", "layers.7.feed"),)))
    assert len(items_of(problem, find_nodes(graph, "layers.3"))) == 1
    between = [*find_nodes(graph, "layers.5.feed"), *find_nodes(graph, "layers.6"), *find_nodes(graph, "layers.7.feed")]
    assert len(items_of(problem, between)) == 1  # what lies on the way comes along
    assert len(items_of(problem, find_nodes(graph, "layers.4"))) > 1


def test_pins_are_kept() -> None:
    graph, costs = captured("stack")
    made = partition(graph, costs, 3, options=Options(pins={"layers.2": 1, "head": 2}))
    assert {made.workers[made.stage_of[node]] for node in find_nodes(graph, "layers.2")} == {1}
    assert {made.workers[made.stage_of[node]] for node in find_nodes(graph, "head")} == {2}


def test_tied_weights_may_be_kept_together() -> None:
    graph, _ = captured("translator")
    users = [*find_nodes(graph, "embed"), *find_nodes(graph, "head")]
    assert len(items_of(problem_of("translator", 2), users)) == 3
    assert len(items_of(problem_of("translator", 2, Options(tied="together")), users)) == 1


class Twice(nn.Module):
    """Two branches that draw, or do not."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.left(x)) + self.drop(self.right(x))


@pytest.mark.parametrize(
    ("make", "options", "ordered"),
    [
        (lambda: Twice(0.5), Options(), True),
        (lambda: Twice(0.5).eval(), Options(), False),
        (lambda: Twice(0.5), Options(random_order=False), False),
    ],
)
def test_draws_keep_their_order_where_there_are_any(
    make: Callable[[], nn.Module], options: Options, ordered: bool
) -> None:
    graph: Graph = capture(make(), (torch.randn(2, 4),))
    first, second = (node.id for node in graph.compute_nodes if node.target == "drop")
    for node in graph.compute_nodes:
        node.after = ()  # a module that runs twice keeps its order anyway
    problem = build_problem(graph, profile(graph, analytic="cpu"), 2, options)
    pairs = {(edge.source, edge.target) for edge in problem.edges if edge.value == ORDER}
    one, other = (items_of(problem, [node]).pop() for node in (first, second))
    assert ((one, other) in pairs) == ordered


def test_values_are_sizes_there_and_gradients_back() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2)).requires_grad_(False)
    model[1].requires_grad_(True)
    graph = capture(model, (torch.randn(16, 4),))
    problem = build_problem(graph, profile(graph, analytic="cpu"), 2, Options())
    sizes = [(round(value.forward_mb * (1 << 20)), round(value.backward_mb * (1 << 20))) for value in problem.values]
    assert sizes == [(16 * 8 * 4, 0), (16 * 2 * 4, 16 * 2 * 4)]


def test_a_value_counts_once_a_worker() -> None:
    problem = problem_of("stack", 3)
    part_of = [0] * len(problem.items)
    readers = problem.readers[0][1]
    for reader in readers:
        part_of[reader] = 1
    once = sum(problem.values[at].mb for at, (maker, _) in enumerate(problem.readers) if part_of[maker] == 0
               and any(part_of[reader] == 1 for reader in problem.readers[at][1]))  # fmt: skip
    back = sum(problem.values[at].mb for at, (maker, _) in enumerate(problem.readers) if part_of[maker] == 1
               and any(part_of[reader] == 0 for reader in problem.readers[at][1]))  # fmt: skip
    assert problem.cut_mb(part_of) == pytest.approx(once + back)
