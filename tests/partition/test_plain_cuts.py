"""Cuts a person would make: as many stages as workers, at module boundaries, none without work."""

from __future__ import annotations

import itertools

import pytest

from gemini.partition.exact.exact_partitioner import partition_exact, search
from gemini.partition.exact.plain_cuts import LEAST_GAIN, prefer_plain, time_ms
from gemini.partition.idle_stages import absorb_idle_stages
from gemini.partition.partition_options import Options
from gemini.partition.partition_problem import Edge, Item, Problem, Value
from gemini.partition.registry import Assignment


def chain(times: list[float], scopes: list[tuple[str, ...]], nparts: int, **options: object) -> Problem:
    """Items that each read the value of the one before."""
    items = [
        Item(name=f"node{at}", nodes=(at,), ms=ms, forward_ms=ms / 2, backward_ms=ms / 2, scope=scope)
        for at, (ms, scope) in enumerate(zip(times, scopes, strict=True))
    ]
    edges = [Edge(at, at + 1, at) for at in range(len(items) - 1)]
    return Problem(tuple(items), tuple(edges), (Value(1.0, 1.0),) * len(edges), nparts, Options(**options))


def stage_ends(found: Assignment) -> list[int]:
    return [at + 1 for at, (one, other) in enumerate(itertools.pairwise(found.stage_of)) if one != other]


LAYERS = [(f"layers.{at // 4}",) for at in range(16)]
# Four layers of four items. The best balance cuts inside layers, 1 % better than at their ends.
UNEVEN = [10.0, 10, 10, 10.4, 10, 10, 10, 9.8, 10, 10, 10, 10, 10, 10, 10, 9.9]


def test_within_two_percent_cuts_are_at_module_boundaries() -> None:
    found = partition_exact(chain(UNEVEN, LAYERS, 4, noise=0.0))
    assert stage_ends(found) == [4, 8, 12]


def test_beyond_two_percent_balance_wins() -> None:
    times = [10.0] * 3 + [14.0] + [10.0] * 12
    problem = chain(times, [(f"layers.{0 if at < 8 else 1}",) for at in range(16)], 2, noise=0.0)
    found = partition_exact(problem)
    assert time_ms(problem, found) <= time_ms(problem, search(problem)) * (1 + LEAST_GAIN)


@pytest.mark.parametrize(("noise", "count"), [(0.5, 2), (0.1, 4)])
def test_more_stages_than_workers_must_win_more_than_the_noise(noise: float, count: int) -> None:
    problem = chain([5.0, 9, 5, 1], [()] * 4, 2, noise=noise)
    straight, mixed = search(problem), Assignment((0, 1, 2, 3), (0, 1, 0, 1))
    assert (time_ms(problem, straight), time_ms(problem, mixed)) == (14.0, 10.0)
    found = prefer_plain(problem, straight, mixed)
    assert len(set(found.stage_of)) == count
    told = "4 stages: the slowest worker is 28.6% faster than with 2 (the noise of the profile is 10.0%)"
    assert found.facts.get("more_stages") == (told if count == 4 else None)


def test_without_noise_the_search_decides_alone() -> None:
    problem = chain([5.0, 9, 5, 1], [()] * 4, 2)
    assert "more_stages" not in partition_exact(problem).facts


def test_a_stage_without_work_joins_a_neighbour() -> None:
    problem = chain([5.0, 0.0, 5, 5, 5], [()] * 5, 2)
    found = absorb_idle_stages(problem, Assignment((0, 1, 2, 3, 3), (0, 1, 0, 1)))
    assert len(set(found.stage_of)) == 3
    assert found.stage_of[1] in (0, 2)
    assert [found.stage_of[at] for at in (0, 2, 3, 4)] == [0, 2, 3, 3]


def test_a_pinned_stage_stays() -> None:
    problem = chain([5.0, 0.0, 5, 5, 5], [()] * 5, 2)
    pinned = tuple(
        Item(one.name, one.nodes, one.ms, one.forward_ms, one.backward_ms, pin=1) if at == 1 else one
        for at, one in enumerate(problem.items)
    )
    problem = Problem(pinned, problem.edges, problem.values, 2, problem.options)
    found = Assignment((0, 1, 2, 3, 3), (0, 1, 0, 1))
    assert absorb_idle_stages(problem, found) == found
