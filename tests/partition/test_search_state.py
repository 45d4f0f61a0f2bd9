"""Predicted effects of moves in the local search state are their actual effects, and moves keep stages ordered."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gemini.errors import PartitionError
from gemini.partition.local_search.acyclic_moves import rearrange
from gemini.partition.local_search.initial import initial_candidates
from gemini.partition.local_search.item_moves import refine
from gemini.partition.local_search.merge_stages import reduce_stages
from gemini.partition.local_search.search_state import SearchState
from gemini.partition.local_search.stage_builder import build_stages
from gemini.partition.partition_problem import Problem
from tests.partition.random_graphs import graphs, made

QUICK = settings(max_examples=40, deadline=None)


def started(problem: Problem, seed: int) -> SearchState:
    """A state of several blocks a worker, from workers drawn at random."""
    rng = random.Random(seed)
    part_of = [item.pin if item.pin is not None else rng.randrange(problem.nparts) for item in problem.items]
    return SearchState(problem, *build_stages(problem, part_of))


def flows(state: SearchState) -> bool:
    return all(state.block_of[edge.source] <= state.block_of[edge.target] for edge in state.problem.edges)


def agrees(state: SearchState) -> None:
    """What the state keeps up to date equals what is computed anew."""
    part_of = state.workers()
    assert state.loads == pytest.approx(state.problem.times(part_of))
    fresh = SearchState(state.problem, state.block_of, state.worker_of)
    assert state.cut == pytest.approx(fresh.cut, abs=1e-6)
    assert state.members == fresh.members
    if state.memory is not None and fresh.memory is not None:
        assert state.memory.steady == pytest.approx(fresh.memory.steady, abs=1e-6)
    if state.problem.options.links.free:
        assert state.cut == pytest.approx(state.problem.cut_mb(part_of), abs=1e-6)


@QUICK
@given(problem=graphs(), seed=st.integers(0, 99))
def test_a_move_does_what_was_said(problem: Problem, seed: int) -> None:
    state = started(problem, seed)
    rng = random.Random(seed)
    for at in rng.sample(range(len(problem.items)), min(10, len(problem.items))):
        for target in list(state.targets(at))[-1:]:
            cut, loads = state.effect(at, target)
            before = state.cut, list(state.loads)
            state.move(at, target)
            assert state.cut == pytest.approx(before[0] + cut, abs=1e-6)
            assert state.loads == pytest.approx([load + loads.get(w, 0.0) for w, load in enumerate(before[1])])
            assert flows(state)
    agrees(state)


@QUICK
@given(problem=graphs(), seed=st.integers(0, 99), moves=st.sampled_from(("simple", "advanced")))
def test_refinement_never_harms(problem: Problem, seed: int, moves: str) -> None:
    state = started(problem, seed)
    assume(0 not in state.members)
    before = (round(state.memory_excess(), 6), state.bottleneck)
    refine(state, moves, random.Random(seed))
    assert flows(state)
    agrees(state)
    if before[0] == 0:
        assert state.memory_excess() < 1e-6
        assert state.bottleneck <= before[1] * (1 + 1e-9)


@QUICK
@given(problem=graphs(), seed=st.integers(0, 99))
def test_global_moves_keep_an_order(problem: Problem, seed: int) -> None:
    state = started(problem, seed)
    before = state.bottleneck
    rearrange(state, before * 0.9, random.Random(seed))
    assert flows(state)
    agrees(state)
    assert state.bottleneck <= before * (1 + 1e-9)


def test_global_moves_reach_what_numbers_forbid() -> None:
    """Two islands: the item of the later block may join the earlier one only if the blocks change places."""
    problem = made([1.0, 1.0, 1.0, 3.0], [(0, 1), (2, 3)], 2)
    state = SearchState(problem, [0, 1, 1, 1], [0, 1])
    assert list(state.targets(1)) == [0]
    rearrange(state, 0.0, random.Random(0))
    assert flows(state)


@QUICK
@given(problem=graphs(), seed=st.integers(0, 99))
def test_stages_are_in_order_and_no_two_could_be_one(problem: Problem, seed: int) -> None:
    rng = random.Random(seed)
    part_of = [rng.randrange(problem.nparts) for _ in problem.items]
    stage_of, worker_of = build_stages(problem, part_of)
    assert [worker_of[stage] for stage in stage_of] == part_of
    assert all(stage_of[edge.source] <= stage_of[edge.target] for edge in problem.edges)
    assert sorted(set(stage_of)) == list(range(len(worker_of)))
    levels: list[int] = []
    for at, before in enumerate(problem.predecessors):
        levels.append(max((levels[other] + (part_of[other] != part_of[at]) for other in before), default=0))
    assert len(worker_of) <= len({(part, level) for part, level in zip(part_of, levels, strict=True)})


@QUICK
@given(problem=graphs(pinned=False, limited=False), seed=st.integers(0, 99))
def test_fewer_stages_stay_within_the_limit(problem: Problem, seed: int) -> None:
    state = started(problem, seed)
    limit = state.bottleneck * 1.1
    stage_of, worker_of = reduce_stages(problem, state.workers(), limit)
    assert len(worker_of) <= len(state.worker_of)
    assert max(problem.times([worker_of[stage] for stage in stage_of])) <= limit * (1 + 1e-9)


@QUICK
@given(problem=graphs())
def test_starts_keep_pins_and_order(problem: Problem) -> None:
    try:
        found = initial_candidates(problem, random.Random(0))
    except PartitionError:
        return
    for answer in found:
        assert all(answer.stage_of[edge.source] <= answer.stage_of[edge.target] for edge in problem.edges)
        assert all(item.pin in (None, part) for item, part in zip(problem.items, answer.part_of, strict=True))
        assert sorted(answer.worker_of) == list(range(problem.nparts))
