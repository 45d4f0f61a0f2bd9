"""Pipelines agree with the schedule simulator and with closed forms where no communication is in the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.errors import ConfigError
from gemini.schedule.library import library
from gemini.schedule.simulate import simulate
from gemini.tune import ParallelConfig
from gemini.tune.layer_cost import spread_layers
from gemini.tune.pipeline_run import check_schedule, estimate_pipeline, run_pipeline
from gemini.tune.stage_costs import StageCost


def stage(forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0) -> StageCost:
    return StageCost(forward, input_gradient, weight_gradient, {}, activations=1.0)


def config(pipeline: int, micro_batches: int, chunks: int = 1, schedule: str = "auto") -> ParallelConfig:
    return ParallelConfig(
        devices=pipeline, pipeline=pipeline, batch=micro_batches, chunks=chunks, schedule=schedule, micro_batch=1
    )


@given(ranks=st.integers(2, 6), more=st.integers(0, 10))
@settings(max_examples=20, deadline=None)
def test_1f1b_and_gpipe(ranks, more):
    count = ranks + more
    for name in ("1f1b", "gpipe"):
        one = config(ranks, count, schedule=name)
        expected = (count + ranks - 1) * 3
        assert run_pipeline(one, [stage()] * ranks, 0.0).seconds == pytest.approx(expected)
        assert estimate_pipeline(one, [stage()] * ranks, 0.0).seconds == pytest.approx(expected)


@given(ranks=st.integers(2, 4), groups=st.integers(1, 4), chunks=st.integers(2, 3))
@settings(max_examples=15, deadline=None)
def test_interleaved_has_the_bubble_of_one_chunk(ranks, groups, chunks):
    one = config(ranks, ranks * groups, chunks)
    expected = (one.micro_batches * chunks + ranks - 1) * 3
    assert run_pipeline(one, [stage()] * (ranks * chunks), 0.0).seconds == pytest.approx(expected)
    assert estimate_pipeline(one, [stage()] * (ranks * chunks), 0.0).seconds == pytest.approx(expected)


@given(ranks=st.integers(2, 6), more=st.integers(0, 8))
@settings(max_examples=15, deadline=None)
def test_zero_bubble_h1(ranks, more):
    count = 2 * ranks + more
    one = config(ranks, count, schedule="zb_h1")
    assert run_pipeline(one, [stage()] * ranks, 0.0).seconds == pytest.approx(3 * count + ranks - 1)
    assert estimate_pipeline(one, [stage()] * ranks, 0.0).seconds == pytest.approx(3 * count + ranks - 1)


def test_zero_bubble_h2_waits_only_at_the_start():
    one = config(4, 16, schedule="zb_h2")
    ran = run_pipeline(one, [stage()] * 4, 0.0)
    assert ran.seconds == pytest.approx(3 * 16 + 3)
    assert estimate_pipeline(one, [stage()] * 4, 0.0).seconds == pytest.approx(ran.seconds)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "looped_bfs", "zb_v"])
def test_it_is_the_plan_of_the_library(name):
    chunks = 2 if name in ("interleaved_1f1b", "looped_bfs", "zb_v") else 1
    split = name.startswith("zb")
    stages = [stage(1.0 + 0.25 * index, 1.0, 0.5) for index in range(3 * chunks)]
    options = {"chunks": chunks} if name in ("interleaved_1f1b", "looped_bfs") else {}
    spans = (
        {"input_gradient": [1.0] * 3 * chunks, "weight_gradient": [0.5] * 3 * chunks}
        if split
        else {"backward": [1.5] * 3 * chunks}
    )
    plan = library(name, 3, 7, forward=[one.forward for one in stages], **spans, **options)
    assert run_pipeline(config(3, 7, chunks, name), stages, 0.0).seconds == pytest.approx(simulate(plan).makespan)


def test_very_many_micro_batches_continue_the_steady_state():
    ranks, count = 8, 4096
    ran = run_pipeline(config(ranks, count), [stage()] * ranks, 0.0)
    assert ran.seconds == pytest.approx((count + ranks - 1) * 3)
    assert len(ran.plan) < 2 * ranks * count / 2
    assert ran.busy[0] == pytest.approx(3 * count)


def test_links_add_their_time_and_peaks_are_the_micro_batches_in_flight():
    still = run_pipeline(config(4, 8), [stage()] * 4, 0.0)
    slow = run_pipeline(config(4, 8), [stage()] * 4, 0.5)
    assert slow.seconds > still.seconds
    assert still.peaks == (4, 3, 2, 1)
    assert estimate_pipeline(config(4, 8), [stage()] * 4, 0.0).peaks == (4, 3, 2, 1)
    assert still.bubble == pytest.approx(9)


def test_layers_are_spread_with_fewer_at_the_ends():
    assert spread_layers(126, 16) == (7, *[8] * 14, 7)
    assert spread_layers(8, 4) == (2, 2, 2, 2)
    assert spread_layers(126, 128) == (0, *[1] * 126, 0)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (config(4, 8, schedule="1f2b"), "did you mean '1f1b'"),
        (config(4, 8, chunks=2, schedule="zb_h1"), "chunks = 2 with zb_h1"),
        (config(3, 2, schedule="chimera"), "chimera"),
    ],
)
def test_schedules_that_do_not_exist(one, words):
    with pytest.raises(ConfigError, match=words):
        check_schedule(one)
