"""The figures by which schedules are compared."""

from __future__ import annotations

import pytest
from handmade import one_f_one_b
from hypothesis import given, settings
from strategies import plans

from gemini.errors import ScheduleError
from gemini.schedule import Block, SchedPlan
from gemini.schedule.placements import placement
from gemini.schedule.plan_metrics import bubble_rate, compare, measure


def test_figures_of_1f1b() -> None:
    figures = measure(one_f_one_b(4, 8), "by hand")
    assert (figures.name, figures.period, figures.makespan) == ("by hand", 3, 33)
    assert figures.bubble == pytest.approx(1 - 24 / 33)
    assert (figures.peaks, figures.peak) == ((4, 3, 2, 1), 4)


@given(plans())
@settings(max_examples=50, deadline=None)
def test_bubbles_are_a_share(plan: SchedPlan) -> None:
    assert -1e-9 <= bubble_rate(plan) < 1


def test_an_empty_plan_has_no_bubbles() -> None:
    assert bubble_rate(SchedPlan(3)) == 0
    assert measure(SchedPlan(2)).makespan == 0


def test_a_block_on_several_devices_keeps_all_of_them_busy() -> None:
    plan = SchedPlan(2)
    plan.add_block_seq([Block(0, 2, 0, "forward"), Block(0, 2, 0, "forward")], [(0, 1), 0])
    assert bubble_rate(plan) == pytest.approx(0.25)


def test_compare_puts_the_plan_first_and_equals_its_twin_in_the_library() -> None:
    rows = compare(one_f_one_b(4, 8), "by hand")
    assert rows[0].name == "by hand"
    names = {row.name: row for row in rows}
    assert (names["1f1b"].makespan, names["1f1b"].peaks) == (rows[0].makespan, rows[0].peaks)
    assert names["gpipe"].peak == 8


def test_only_schedules_that_fit_the_placement_are_compared() -> None:
    plan = one_f_one_b(4, 8)
    plan.placement = placement("mshape", 4)
    assert "1f1b" not in {row.name for row in compare(plan)}


def test_without_a_placement_there_is_nothing_to_compare_with() -> None:
    plan = one_f_one_b(2, 2)
    plan.placement = None
    with pytest.raises(ScheduleError, match="has no placement"):
        compare(plan)
