"""Infeasible requests are refused before and after the search, with feasible alternatives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.errors import PartitionError
from gemini.partition import Options, Worker, partition
from gemini.partition.infeasible import contradictory_pins
from gemini.partition.memory_shortage import find_shortage
from gemini.partition.partition_problem import Edge, Item, Problem, Value
from gemini.partition.problem_builder import build_problem
from gemini.profiling import profile
from gemini.schedule.link_costs import Links
from tests.partition.shapes import Stack, captured, problem_of


def refused(nparts: int, model: str = "stack", partitioner: str = "exact", **options: object) -> str:
    graph, costs = captured(model)
    with pytest.raises(PartitionError) as caught:
        partition(graph, costs, nparts, partitioner, Options(**options))  # type: ignore[arg-type]
    return str(caught.value)


def test_more_parts_than_pieces() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    graph = capture(model, (torch.randn(2, 4),))
    with pytest.raises(PartitionError) as caught:
        partition(graph, profile(graph, analytic="cpu"), 4)
    assert str(caught.value).startswith("Sequential cannot be cut into 4 parts: 3 is the most")
    assert "request 3 parts or fewer" in str(caught.value)


class Branching(nn.Module):
    """Branches on what it computes: it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * 2 if x.sum() > 0 else x - 1


def test_a_model_captured_whole() -> None:
    graph = capture(Branching(), (torch.randn(2, 4),))
    with pytest.raises(
        PartitionError, match=r"1 is the most, because it could only be captured as one node: .*\n    → "
    ):
        partition(graph, profile(graph, analytic="cpu"), 2)


def test_whole_blocks_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Branching(), nn.Linear(4, 4))
    graph = capture(model, (torch.randn(2, 4),))
    with pytest.raises(PartitionError, match=r"3 is the most\n  - 1 is not divided: .*branches"):
        partition(graph, profile(graph, analytic="cpu"), 4)


def test_tied_weights_kept_together_may_leave_few_pieces() -> None:
    said = refused(20, "translator", tied="together")
    assert "cannot be cut into 20 parts" in said
    assert 'tied="together"' in said
    assert 'tied="sync"' in said


@pytest.mark.parametrize("nparts", [0, -1, 2.5, "2", True, None])
def test_a_wrong_number_of_parts(nparts: object) -> None:
    graph, costs = captured("stack")
    with pytest.raises(PartitionError, match="request an integer, 1 or more"):
        partition(graph, costs, nparts)  # type: ignore[arg-type]


def test_the_profile_of_another_graph() -> None:
    graph, _ = captured("stack")
    _, other = captured("u")
    with pytest.raises(PartitionError, match="the profile of U does not match this graph of Stack") as caught:
        partition(graph, other, 2)
    assert "→ profile(graph)" in str(caught.value)


def test_all_unknown_scopes_are_told_with_what_was_meant() -> None:
    said = refused(2, pins={"layers.O": 0, "layers.3": 7}, uncut=("embd",), workers=(Worker(),))
    assert "no scope 'layers.O'" in said
    assert "no scope 'embd'; did you mean 'embed'?" in said
    assert "'layers.3' is pinned to part 7 of 2" in said
    assert "1 workers are described for 2 parts" in said


def test_links_of_another_number_of_workers() -> None:
    assert "the latency table of links is for 3 workers, not 2" in refused(2, links=Links(((0, 1, 1),) * 3))


# ── pins ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pins_within_one_piece_contradict_each_other() -> None:
    said = refused(2, uncut=("layers.3",), pins={"layers.3.attention": 0, "layers.3.feed": 1})
    assert "pins contradict each other" in said
    assert "'layers.3.feed' is pinned to part 1, and 'layers.3.attention', which must share its stage" in said


def test_pins_contradict_each_other_through_order() -> None:
    said = refused(2, mixed=False, pins={"layers.0": 0, "layers.3": 1, "layers.6": 0})
    assert "pins contradict each other with one stage per worker" in said
    assert "mixed=True" in said


def test_pins_against_the_numbers_of_workers_are_no_contradiction() -> None:
    graph, costs = captured("stack")
    made = partition(graph, costs, 2, options=Options(pins={"layers.0": 1, "layers.11": 0}))
    assert made.workers == (1, 0)


def test_parts_that_need_each_other_are_found() -> None:
    items = tuple(Item(f"i{at}", (at,), 1, 1, 1, pin=pin) for at, pin in enumerate((0, None, 1, None, 0)))
    edges = tuple(Edge(at, at + 1, at) for at in range(4))
    problem = Problem(items, edges, (Value(1, 1),) * 4, 2, Options())
    (fault,) = contradictory_pins(problem)
    assert "i2 (part 1) needs i0 (part 0); i4 (part 0) needs i2 (part 1)" in fault


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_missing_memory_is_told_with_what_would_do() -> None:
    need = find_shortage(problem_of("stack", 2, Options(workers=(Worker(1, 1e-6),) * 2)))
    limit = need.needs_mb * 0.75
    said = refused(2, workers=(Worker(1, limit),) * 2)
    assert "does not fit the memory of the workers" in said
    missing = float(re.findall(r"([\d.]+) MB too little", said)[0])
    parts = int(re.findall(r"nparts=(\d+) fits", said)[0])
    assert parts > 2
    graph, costs = captured("stack")
    partition(graph, costs, parts, options=Options(workers=(Worker(1, limit),) * parts))
    with pytest.raises(PartitionError):
        partition(graph, costs, parts - 1, options=Options(workers=(Worker(1, limit),) * (parts - 1)))
    partition(graph, costs, 2, options=Options(workers=(Worker(1, limit + missing + 0.2),) * 2))


def test_recomputation_is_proposed_where_it_fits() -> None:
    torch.manual_seed(0)
    graph = capture(Stack(6), (torch.randint(0, 1000, (8, 32)),), depth=1)
    costs = profile(graph, analytic="cpu")
    plain = Options(workers=(Worker(1, 1e-6),) * 2, optimizer_copies=0, micro_batches=1)
    kept = find_shortage(build_problem(graph, costs, 2, plain)).needs_mb
    again = find_shortage(build_problem(graph, costs, 2, replace(plain, recompute=True))).needs_mb
    assert again < kept
    options = replace(plain, workers=(Worker(1, (kept + again) / 2),) * 2)
    with pytest.raises(PartitionError, match="recompute=True fits"):
        partition(graph, costs, 2, options=options)
    partition(graph, costs, 2, options=replace(options, recompute=True))


@pytest.mark.parametrize("partitioner", ["exact", "acyclic", "mpipe"])
def test_every_partitioner_explains_what_is_missing(partitioner: str) -> None:
    said = refused(2, partitioner=partitioner, workers=(Worker(1, 0.5), Worker(1, 0.5)), time_limit=1.0)
    assert "MB too little" in said


def test_an_answer_that_ignores_pins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemini.partition.exact import exact_partitioner
    from gemini.partition.registry import Assignment

    def careless(problem: Problem) -> Assignment:
        return Assignment(tuple(at * 2 // len(problem.items) for at in range(len(problem.items))), (0, 1))

    monkeypatch.setattr(exact_partitioner, "partition_exact", careless)
    assert "is pinned to part 1 and was assigned to part 0" in refused(2, pins={"layers.0": 1})
