"""Warm-up, steady state and cool-down are derived from the start times."""

from __future__ import annotations

from collections import Counter

import pytest
from handmade import interleaved, one_f_one_b
from hypothesis import given, settings
from strategies import placements, plans

from gemini.schedule import Composer, Pattern, SchedPlan
from gemini.schedule.library import LIBRARY, library
from gemini.schedule.phases import find_phases


def test_phases_of_1f1b() -> None:
    phases = find_phases(one_f_one_b(4, 8))
    assert phases is not None
    assert (phases.period, phases.begin, phases.end, phases.kernels) == (3, 10, 22, 4)


def test_no_steady_state_where_there_is_none() -> None:
    assert find_phases(one_f_one_b(8, 4)) is None
    assert find_phases(SchedPlan(1)) is None
    assert find_phases(one_f_one_b(2, 1)) is None


def test_a_pattern_needs_only_one_kernel_in_view() -> None:
    plan = one_f_one_b(4, 5)
    assert find_phases(plan) is None
    starts = [0] * 8
    for block in plan:
        if block.mid == 0:
            starts[block.gid or 0] = plan.step(block)
    plan.pattern = Pattern(3, 1, (tuple(starts),))
    phases = find_phases(plan)
    assert phases is not None
    assert phases.kernels == 1


@given(plans())
@settings(max_examples=60, deadline=None)
def test_what_is_called_steady_really_repeats(plan: SchedPlan) -> None:
    phases = find_phases(plan)
    if phases is None:
        return
    starts = {(block.gid, block.mid): plan.step(block) for block in plan}
    for (gid, mid), start in starts.items():
        if phases.begin <= start < phases.end - phases.length - 1e-6:
            assert starts[gid, mid + phases.nmicros] == pytest.approx(start + phases.length)


def test_a_kernel_of_several_micro_batches_is_found() -> None:
    phases = find_phases(library("chimera", 4, 16))
    assert phases is not None
    assert phases.nmicros == 2


@given(placements())
@settings(max_examples=40, deadline=None)
def test_the_repetend_of_a_composed_plan_holds_every_block_once_a_micro_batch(shape: SchedPlan) -> None:
    plan = Composer.compose(shape, time_limit=1)
    assert plan.pattern is not None
    if plan.repetend is not None:
        begin, end = plan.repetend
        assert end - begin == pytest.approx(plan.pattern.length)
        counts = Counter(block.gid for block in plan.extract(begin, end))
        assert counts == dict.fromkeys(range(len(shape)), plan.pattern.nmicros)


def test_real_times_repeat_up_to_rounding() -> None:
    phases = find_phases(one_f_one_b(4, 12, spans=(0.1, 0.2, 0)))
    assert phases is not None
    assert phases.period == pytest.approx(0.3)


def test_all_forwards_then_all_backwards_never_is_steady() -> None:
    assert find_phases(interleaved(2, 8)) is None
    assert find_phases(library("gpipe", 4, 16)) is None


@pytest.mark.parametrize("name", LIBRARY)
def test_no_known_schedule_beats_the_work_of_its_busiest_device(name: str) -> None:
    plan = library(name, 4, 16)
    phases = find_phases(plan)
    if phases is not None:
        work = max(sum(block.span for block in plan.device_blocks(device)) for device in range(4)) / plan.nmicros
        assert phases.period >= work - 1e-9
