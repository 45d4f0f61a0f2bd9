"""Schedules from the order on each device."""

from __future__ import annotations

import pytest
from handmade import pipeline_placement
from hypothesis import given, settings
from strategies import plans

from gemini.errors import InvalidPlanError, PlacementError
from gemini.schedule import Block, Links, SchedPlan
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.placements import placement


@given(plans())
@settings(max_examples=80, deadline=None)
def test_a_plan_is_its_orders_once_tightened(plan: SchedPlan) -> None:
    """Taking any plan apart into orders and putting it together gives the plan with all idle time out."""
    assert plan.placement is not None
    orders = [[block.action for block in plan.device_blocks(device)] for device in range(plan.ndevs)]
    again = plan_from_orders(plan.placement, orders)
    again.validate()
    tight = plan.tighten()
    assert {str(block): again.step(block) for block in again} == {str(block): tight.step(block) for block in tight}


def test_blocks_on_several_devices_start_when_all_are_free() -> None:
    shape = placement("mshape", 2)
    orders = [["0F0", "1F0", "1B0", "0B0"], ["0F0", "2F0", "2B0", "0B0"]]
    assert plan_from_orders(shape, orders).nsteps == shape.nsteps


def test_links_delay_what_crosses_them() -> None:
    shape = pipeline_placement(2)
    shape.links = Links(latency=0.5)
    plan = plan_from_orders(shape, [["0F0", "0B0"], ["1F0", "1B0"]])
    assert {str(block): plan.step(block) for block in plan} == {"0F0": 0, "1F0": 1.5, "1B0": 2.5, "0B0": 5.0}


def test_a_deadlock_says_what_every_device_waits_for() -> None:
    with pytest.raises(InvalidPlanError, match=r"(?s)device 0 is at 0B0, which needs 1B0.*device 1 is at 1B0"):
        plan_from_orders(pipeline_placement(2), [["0B0", "0F0"], ["1B0", "1F0"]])


def test_a_block_missing_from_one_of_its_devices_is_a_deadlock() -> None:
    shape = SchedPlan(2)
    shape.add_block(Block(0, 1, 0, "forward"), (0, 1), 0)
    with pytest.raises(InvalidPlanError, match="waits for the other devices"):
        plan_from_orders(shape, [["0F0"], []])


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(PlacementError) as caught:
        plan_from_orders(pipeline_placement(2), [["1F0", "7F0", "0F0", "0F0"]])
    message = str(caught.value)
    for part in ("1 rows for a placement on 2", "1F0 is placed on 1", "7F0 is no block", "0F0 comes twice"):
        assert part in message


def test_two_blocks_of_one_name_cannot_be_ordered_by_name() -> None:
    shape = SchedPlan(1)
    shape.add_block(Block(0, 1, 0, "forward", stage=0), 0, 0)
    shape.add_block(Block(0, 1, 0, "forward", stage=0), 0, 1)
    with pytest.raises(PlacementError, match="0F0 names two blocks"):
        plan_from_orders(shape, [["0F0"]])
