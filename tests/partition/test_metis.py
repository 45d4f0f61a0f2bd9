"""METIS: the library call, its parts as stages, and the error where it is not installed."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings

from gemini.errors import MissingEngineError, PartitionError
from gemini.partition import Worker
from gemini.partition.metis.acyclic_repair import fill_empty_parts, match_workers, repair_to_sequence
from gemini.partition.metis.metis_call import Metis
from gemini.partition.metis.metis_partitioner import partition_metis
from gemini.partition.partition_problem import Problem
from tests.partition.random_graphs import chain, graphs, made
from tests.partition.shapes import problem_of


def test_names_the_extra_where_the_engine_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MissingEngineError, match=r"gemini-instrumenter\[metis\]"):
        partition_metis(made([1.0] * 4, chain(4), 2))


def test_mpipe_does_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemini.partition.mpipe.mpipe_partitioner import partition_mpipe

    monkeypatch.setitem(sys.modules, "pymetis", None)
    assert len(set(partition_mpipe(made([1.0] * 8, chain(8), 2)).stage_of)) == 2


def test_parts_follow_the_speed_of_workers() -> None:
    problem = made([1.0] * 90, chain(90), 2, workers=(Worker(1.0), Worker(2.0)))
    parts = Metis(problem).parts(seed=1, imbalance=5, recursive=False)
    assert parts.count(1) / parts.count(0) == pytest.approx(2.0, rel=0.1)


def test_the_engine_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for count in (2, 3, 5, 8, 13):
        for nparts in range(2, min(count, 8) + 1):
            partition_metis(made([0.0] * (count // 2) + [5.0] * (count - count // 2), chain(count), nparts))
            partition_metis(made([1.0] * (count - 1) + [1000.0], chain(count), nparts))
    assert capfd.readouterr() == ("", "")


@settings(max_examples=30, deadline=None)
@given(problem=graphs(limited=False, linked=False))
def test_repaired_parts_flow_forward(problem: Problem) -> None:
    raw = Metis(problem).parts(seed=1, imbalance=20, recursive=False)
    part_of = fill_empty_parts(problem, match_workers(problem, raw))
    try:
        found = repair_to_sequence(problem, part_of)
    except PartitionError:  # pins that ask for a circle
        return
    for stage_of, worker_of in found:
        assert all(stage_of[edge.source] <= stage_of[edge.target] for edge in problem.edges)
        assert sorted(worker_of) == list(range(problem.nparts))
        assert all(item.pin in (None, worker_of[stage]) for item, stage in zip(problem.items, stage_of, strict=True))


def test_mixed_pipes_are_more_balanced_than_plain_ones_on_uneven_models() -> None:
    problem = problem_of("u", 4)
    found = partition_metis(problem)
    assert problem.bottleneck([found.worker_of[stage] for stage in found.stage_of]) < 1.04
