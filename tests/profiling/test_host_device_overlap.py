"""A step takes as long as the slower of host and device, and the shares of its nodes add up to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.profiling.host_time import NodeLaunch, step_shares

ms = st.floats(0.0, 100.0)
loads = st.lists(st.builds(NodeLaunch, ms, ms, st.integers(0, 50)), min_size=1, max_size=30)


@settings(deadline=None)
@given(loads)
def test_between_the_slower_side_and_both_in_turn(some):
    host, device = sum(load.host_ms for load in some), sum(load.device_ms for load in some)
    found = step_shares(some)
    assert len(found) == len(some)
    assert all(share >= -1e-9 for share in found)
    assert max(host, device) - 1e-6 <= sum(found) <= host + device + 1e-6


@settings(deadline=None)
@given(loads)
def test_without_a_host_the_shares_are_the_times_of_the_device(some):
    found = step_shares([load._replace(host_ms=0.0) for load in some])
    assert found == pytest.approx([load.device_ms for load in some], abs=1e-6)


@settings(deadline=None)
@given(loads)
def test_without_a_device_the_shares_add_up_to_the_host(some):
    found = step_shares([load._replace(device_ms=0.0) for load in some])
    assert sum(found) == pytest.approx(sum(load.host_ms for load in some), abs=1e-6)


def test_each_node_is_charged_for_what_it_holds_up():
    device_bound, host_bound = NodeLaunch(1.0, 10.0, 1), NodeLaunch(20.0, 1.0, 1)
    assert step_shares([device_bound, device_bound, host_bound]) == pytest.approx([11.0, 10.0, 2.0])
