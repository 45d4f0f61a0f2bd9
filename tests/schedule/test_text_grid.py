"""The text grid shows every block at its time and device and marks omissions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import plans

from gemini.schedule import Block, Proof, SchedPlan
from gemini.schedule.library import library
from gemini.schedule.placements import placement
from gemini.schedule.text_grid import grid


def test_the_shape_of_a_grid():
    assert repr(library("1f1b", 2, 2)) == (
        "2 devices, 2 micro-batches, 8 blocks, makespan 9\n"
        "time      0   1   2   3   4   5   6   7   8\n"
        "dev 0   0F0 0F1   .   . 0B0 ───   . 0B1 ───\n"
        "dev 1     . 1F0 1B0 ─── 1F1 1B1 ───   .   ."
    )


def cells(text: str) -> dict[int, list[str]]:
    rows = (line.split() for line in text.splitlines() if line.startswith("dev"))
    return {int(row[1]): row[2:] for row in rows}


@given(plans(reals=True, links=True))
def test_every_device_shows_its_blocks_in_order(plan):
    shown = cells(grid(plan, width=100_000))
    for dev in range(plan.ndevs):
        names = [name for name in shown[dev] if name not in (".", "───")]
        assert names == [str(block) for block in plan.device_blocks(dev)]


@given(plans(reals=True), st.data())
def test_marked_blocks_are_always_in_sight(plan, data):
    mark = data.draw(st.sampled_from(list(plan)))
    text = grid(plan, marks=[mark], width=data.draw(st.integers(1, 200)), max_devices=1)
    assert f"!{mark}" in text.split()


def test_columns_are_units_where_times_have_one_and_events_where_not():
    def times(plan: SchedPlan) -> list[str]:
        return grid(plan, width=1000).splitlines()[1].split()[1:]

    assert times(placement("vshape", 1, forward=10, backward=30)) == ["0", "10", "20", "30"]
    assert times(placement("vshape", 1, forward=0.25, backward=0.5)) == ["0", "0.25", "0.5"]
    assert times(placement("vshape", 1, forward=1, backward=5000)) == ["0", "1"]
    assert times(placement("vshape", 1, forward=0.123456789, backward=1)) == ["0", "0.12346"]
    assert times(placement("vshape", 1, forward=1e-11, backward=2e-11)) == ["0", "1e-11"]
    assert times(placement("vshape", 2, forward=0.1, backward=0.2)) == ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]


def test_wide_plans_are_cut_and_say_so():
    text = grid(library("gpipe", 2, 100), width=80)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert all(line.endswith(" …") for line in lines[1:4])
    assert re.search(r"… \d+ of 303 columns left out, to time 303", text)


def test_a_cut_grid_shows_every_mark():
    plan = library("gpipe", 2, 100)
    marks = [block for block in plan if str(block) in ("0F3", "1B50", "0B99")]
    text = grid(plan, marks=marks, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(f"!{block}" in text for block in marks)
    starts = [str(plan.step(block)) for block in marks]
    assert set(starts) <= set(text.splitlines()[1].split())


def test_many_devices_are_cut_and_say_so():
    text = grid(library("1f1b", 100, 2), max_devices=10)
    assert len(cells(text)) == 10
    assert "… 90 of 100 devices left out" in text


def test_two_blocks_at_once_share_a_cell():
    plan = SchedPlan(1)
    plan.add_block(Block(0, 2, 0, "forward"), 0, 0)
    second = plan.add_block(Block(0, 2, 0, "forward"), 0, 1)
    assert cells(grid(plan, marks=[second]))[0] == ["0F0", "0F0+!1F0", "───"]


def test_what_is_known_about_a_plan_stands_below():
    plan = placement("vshape", 2)
    plan.proof = Proof(4.0, 4.0, True, "search", 0.5)
    assert repr(plan).splitlines()[-1] == "period 4, lower bound 4, optimal; found by search in 0.5 s"


def test_an_empty_plan_prints():
    assert repr(SchedPlan(2)) == "2 devices, 0 micro-batches, 0 blocks, makespan 0\n(no blocks)"


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_grid_still_shows_something(width):
    assert "0F0" in grid(placement("vshape", 4), width=width)
