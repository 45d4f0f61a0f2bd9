"""Contention: measured slowdowns and their effect on a profile."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gemini.capture import capture
from gemini.planner import contention
from gemini.planner.contention import Contention, contention_from_speeds, measure_contention
from gemini.profiling import profile
from gemini.profiling.host_speed import HostSpeed, measure_speed


@given(st.floats(1, 3), st.floats(1, 3), st.floats(0, 100), st.floats(0, 1000))
def test_a_factor_lies_between_that_of_memory_and_that_of_the_processor(
    memory: float, compute: float, ms: float, moved_mb: float
) -> None:
    found = Contention(memory, compute, 10.0).factor(ms, moved_mb)
    assert min(memory, compute) - 1e-9 <= found <= max(memory, compute) + 1e-9


def test_what_only_moves_is_slowed_by_memory_and_what_only_computes_is_not() -> None:
    slow = Contention(memory=2.0, compute=1.0, mb_per_ms=10.0)
    assert slow.factor(1.0, 10.0) == 2.0
    assert slow.factor(1.0, 0.0) == 1.0
    assert slow.factor(0.0, 0.0) == 1.0


def test_times_of_a_profile_grow_and_nothing_else_changes() -> None:
    batch = torch.randn(2, 16)
    costs = profile(capture(nn.Linear(16, 16), (batch,)), (batch,), cache=False, check=False, rounds=1)
    slowed = Contention(2.0, 2.0).slow_down(costs)
    assert [node.ms for node in slowed] == pytest.approx([2 * node.ms for node in costs])
    assert [node.saved_mb for node in slowed] == [node.saved_mb for node in costs]


def test_probes_run_and_find_no_speed_up() -> None:
    found = measure_contention(2)
    assert found.memory >= 1
    assert found.compute >= 1
    assert found.mb_per_ms > 0.1


def test_more_workers_than_cores_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "_rates", lambda _: (10.0, 10.0))
    contention._measure_with_probes.cache_clear()
    assert measure_contention(4 * len(os.sched_getaffinity(0))).compute == 4.0
    contention._measure_with_probes.cache_clear()


def test_workers_are_asked_where_there_are_some() -> None:
    alone, slow, slower = HostSpeed(8.0, 20.0), HostSpeed(8.0, 10.0), HostSpeed(4.0, 5.0)
    cores = len(os.sched_getaffinity(0))
    found = measure_contention(cores, measure_speeds=lambda: (alone, (slow, slow, slower)))
    assert found == Contention(memory=2.0, compute=1.0, mb_per_ms=20.0)
    assert contention_from_speeds(alone, (slower, slower), turns=2.0) == Contention(
        6.0, 4.0, 20.0
    )  # three times as slow at most


def test_this_process_has_a_speed() -> None:
    found = measure_speed(rounds=1)
    assert found.products > 0
    assert found.moved_mb > 0


def test_without_probes_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    contention._measure_with_probes.cache_clear()
    assert measure_contention(1) == Contention()
    contention._measure_with_probes.cache_clear()
