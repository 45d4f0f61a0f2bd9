"""Blocks without an order get start times that satisfy every constraint."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import placements

from gemini.errors import PlacementError
from gemini.schedule import Block
from gemini.schedule.asap_times import asap


@given(placements(reals=True, links=True))
def test_times_keep_every_rule_and_leave_no_gap_that_could_be_closed(plan):
    starts = asap({block: plan.device(block) for block in plan}, plan.links)
    timed = plan.retimed(starts).validate()
    tight = timed.tighten()
    assert [timed.step(block) for block in timed] == pytest.approx([tight.step(block) for block in tight])
    assert list(starts.values()) == sorted(starts.values())


def test_a_cycle_is_named():
    one, two, free = (Block(0, 1, 0, "forward", stage=stage) for stage in range(3))
    Block.make_dependency(one, two)
    Block.make_dependency(two, one)
    with pytest.raises(PlacementError, match="in a cycle: 0F0, 1F0\n    → remove one"):
        asap({one: (0,), two: (0,), free: (0,)})
