"""All heuristic partitioners return valid stages, keep constraints, and are deterministic and balanced."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings

from gemini.errors import PartitionError
from gemini.partition import Options, Worker, partition
from gemini.partition.baseline import assign_equal_layers
from gemini.partition.entry import order_items
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment, find_partitioner
from tests.partition.random_graphs import HEURISTICS, chain, graphs, made, shapes
from tests.partition.shapes import MODELS, captured, problem_of

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def solved(problem: Problem, name: str) -> Assignment | None:
    """The answer, if there is one."""
    try:
        return find_partitioner(name)(problem)
    except PartitionError:
        return None


def checked(problem: Problem, name: str, found: Assignment) -> float:
    """The bottleneck of an answer that keeps to what was asked."""
    stages, workers = order_items(problem, found)
    part_of = [found.worker_of[stage] for stage in found.stage_of]
    assert sorted(item for stage in stages for item in stage) == list(range(len(problem.items)))
    if all(item.pin is None for item in problem.items):
        assert set(part_of) == set(range(problem.nparts)), "a worker has nothing to run"
    assert all(item.pin in (None, part) for item, part in zip(problem.items, part_of, strict=True))
    for mb, worker in zip(problem.worker_memory_mb(stages, workers), problem.workers, strict=True):
        assert worker.memory_mb is None or mb <= worker.memory_mb * (1 + 1e-6)
    if problem.options.mixed is False or name in ("acyclic", "multilevel"):
        assert len(set(workers)) == len(workers)
    return problem.bottleneck(part_of)


@pytest.mark.parametrize("name", HEURISTICS)
class TestEveryone:
    @FEW
    @given(problem=graphs())
    def test_keeps_to_what_was_asked(self, name: str, problem: Problem) -> None:
        found = solved(problem, name)
        if found is not None:
            checked(problem, name, found)

    @FEW
    @given(problem=graphs(limited=False, pinned=False))
    def test_always_answers_without_limits_and_pins(self, name: str, problem: Problem) -> None:
        found = solved(problem, name)
        assert found is not None
        checked(problem, name, found)

    @settings(FEW, max_examples=3)
    @given(problem=graphs())
    def test_repeats_itself(self, name: str, problem: Problem) -> None:
        assert solved(problem, name) == solved(problem, name)

    @FEW
    @given(problem=graphs(limited=False, pinned=False, linked=False))
    def test_is_within_the_largest_item_of_ideal(self, name: str, problem: Problem) -> None:
        """Filling workers in turn up to the ideal overshoots by one item at most, so nobody may do worse than that."""
        found = solved(problem, name)
        assert found is not None
        if len({worker.speed for worker in problem.workers}) == 1:
            largest = max(item.ms for item in problem.items) / problem.workers[0].speed
            bound = (problem.ideal_ms + largest) * (1 + problem.options.slack)
            part_of = [found.worker_of[stage] for stage in found.stage_of]
            assert max(problem.loads(part_of)) <= bound + 1e-9

    @pytest.mark.parametrize("shape", shapes())
    def test_odd_shapes(self, name: str, shape: str) -> None:
        problem = shapes()[shape]
        found = solved(problem, name)
        assert found is not None
        checked(problem, name, found)

    def test_more_parts_than_items(self, name: str) -> None:
        with pytest.raises(PartitionError, match="2 items cannot fill 3 parts"):
            find_partitioner(name)(made([1.0, 1.0], [(0, 1)], 3))

    @pytest.mark.parametrize("model", MODELS)
    def test_models(self, name: str, model: str) -> None:
        graph, costs = captured(model)
        found = partition(graph, costs, 3, name)
        problem = problem_of(model, 3)
        assert set(found.workers) == {0, 1, 2}
        assert problem.bottleneck(_parts(problem, found.stage_of, found.workers)) < 1.1

    def test_memory_decides(self, name: str) -> None:
        """A worker with little memory gets little, whatever that does to the balance."""
        graph, costs = captured("stack")
        free = partition(graph, costs, 2, name)
        problem = problem_of("stack", 2)
        items, workers = _items(problem, free.stage_of), free.workers
        used = problem.worker_memory_mb(items, workers)
        tight = Options(workers=(Worker(1.0, used[0] * 0.8), Worker(1.0, None)))
        found = partition(graph, costs, 2, name, tight)
        limited = problem_of("stack", 2, tight)
        assert limited.worker_memory_mb(_items(limited, found.stage_of), found.workers)[0] <= used[0] * 0.8 * (1 + 1e-6)

    def test_memory_that_is_not_there(self, name: str) -> None:
        graph, costs = captured("stack")
        with pytest.raises(PartitionError, match=r"MB too little"):
            partition(graph, costs, 2, name, Options(workers=(Worker(1.0, 1.0), Worker(1.0, 1.0))))

    def test_pins(self, name: str) -> None:
        graph, costs = captured("stack")
        found = partition(graph, costs, 3, name, Options(pins={"layers.0": 2, "head": 0}))
        named = {node.name: node for node in graph.compute_nodes}
        assert found.workers[found.stage_of[named["head"].id]] == 0
        assert found.workers[found.stage_of[named["layers.0.feed.up"].id]] == 2

    def test_fast_workers_do_more(self, name: str) -> None:
        problem = made([1.0] * 80, chain(80), 3, workers=(Worker(1.0), Worker(2.0), Worker(5.0)))
        found = find_partitioner(name)(problem)
        assert problem.bottleneck([found.worker_of[stage] for stage in found.stage_of]) <= 1.06


def _items(problem: Problem, stage_of: dict[int, int]) -> list[list[int]]:
    stages: list[list[int]] = [[] for _ in range(max(stage_of.values()) + 1)]
    for at, item in enumerate(problem.items):
        stages[stage_of[item.nodes[0]]].append(at)
    return stages


def _parts(problem: Problem, stage_of: dict[int, int], workers: tuple[int, ...]) -> list[int]:
    return [workers[stage_of[item.nodes[0]]] for item in problem.items]


# ── mpipe and the others ───────────────────────────────────────────────────────────────────────────────────────────
@FEW
@given(problem=graphs())
@example(problem=shapes()["one giant"])
def test_mpipe_is_never_slower(problem: Problem) -> None:
    mine = solved(problem, "mpipe")
    for name in ("metis", "acyclic"):
        other = solved(problem, name)
        if other is not None:
            assert mine is not None
            assert checked(problem, "mpipe", mine) <= checked(problem, name, other) * (1 + 1e-9)


@pytest.mark.parametrize("nparts", [4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_mpipe_is_never_slower_on_models(model: str, nparts: int) -> None:
    problem = problem_of(model, nparts)
    graph, _ = captured(model)
    mine = checked(problem, "mpipe", find_partitioner("mpipe")(problem))
    others = [find_partitioner(name)(problem) for name in ("metis", "acyclic")] + [assign_equal_layers(graph, problem)]
    for other in others:
        part_of = [other.worker_of[stage] for stage in other.stage_of]
        assert mine <= problem.bottleneck(part_of) * (1 + 1e-9)
    assert mine <= 1.03
