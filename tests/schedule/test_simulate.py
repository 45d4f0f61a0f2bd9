"""The simulator keeps the order, computes the times, and explains deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import plans

from gemini.errors import InvalidPlanError, PlacementError
from gemini.schedule import Block, Links, SchedPlan
from gemini.schedule.placements import placement
from gemini.schedule.simulate import simulate
from gemini.schedule.validate import find_faults

ANY = {"reals": True, "links": True}


@given(plans(**ANY))
def test_unchanged_times_give_the_tightened_plan(plan):
    run = simulate(plan)
    tight = plan.tighten()
    twins = dict(zip(plan, tight))
    assert run.completed
    assert all(start == pytest.approx(tight.step(twins[block])) for block, (start, _) in run.times.items())
    assert run.makespan == pytest.approx(tight.nsteps)
    assert run.makespan <= plan.nsteps * (1 + 1e-9)
    assert run.peak_memory == tuple(plan.peak_memory(dev) for dev in range(plan.ndevs))


@given(plans(**ANY), st.floats(0, 0.9), st.integers(0, 99), st.data())
def test_what_ran_is_a_valid_plan_in_the_same_order(plan, jitter, seed, data):
    factors = {gid: data.draw(st.floats(0.5, 2)) for gid in {block.gid for block in plan}}
    run = simulate(plan, spans=lambda block: block.span * factors[block.gid], jitter=jitter, seed=seed)
    ran = run.executed()
    if not jitter:
        assert not find_faults(ran)
    assert not [fault for fault in find_faults(ran) if fault.rule == "exclusivity"]
    for dev in range(plan.ndevs):
        assert [str(b) for b in ran.device_blocks(dev)] == [str(b) for b in plan.device_blocks(dev)]
    assert all(0 <= idle <= 1 for idle in run.idle)
    busy = sum((end - start) * len(plan.device(block)) for block, (start, end) in run.times.items())
    assert run.idle_share == pytest.approx(1 - busy / run.makespan / plan.ndevs, abs=1e-9)


@given(plans(**ANY), st.integers(0, 99))
def test_a_seed_repeats_its_run_and_longer_links_never_help(plan, seed):
    one, two = (simulate(plan, jitter=0.3, seed=seed) for _ in range(2))
    assert one == two
    calm = simulate(plan, links=Links())
    assert simulate(plan).makespan >= calm.makespan - 1e-9
    assert simulate(plan, links=Links(latency=5)).makespan >= calm.makespan


def test_spans_by_type_and_by_block():
    plan = placement("vshape", 2)
    assert simulate(plan, spans={"Forward": 2, "BACKWARD": 1}).makespan == 6
    assert simulate(plan, spans={0: 10}).makespan == 1 + 10 + 6
    assert simulate(plan, spans={"F": 5}, links=Links(latency=1)).makespan == 10 + 6 + 2


def crossed() -> SchedPlan:
    """Two devices, each of which has first what needs the other's second."""
    plan = SchedPlan(2)
    blocks = [Block(0, 1, 0, "forward", stage=stage) for stage in range(4)]
    Block.make_dependency(blocks[0], blocks[3])
    Block.make_dependency(blocks[1], blocks[2])
    for block, device, start in zip(blocks, (0, 1, 0, 1), (1, 1, 0, 0)):
        plan.add_block(block, device, start)
    return plan


def test_a_deadlock_names_the_blocks_that_wait_for_each_other():
    run = simulate(crossed())
    assert not run.completed
    assert {str(wait.block) for wait in run.deadlock} == {"0F0", "1F0", "2F0", "3F0"}
    assert all(wait.other is after.block for wait, after in zip(run.deadlock, run.deadlock[1:]))
    assert run.deadlock[-1].other is run.deadlock[0].block
    with pytest.raises(InvalidPlanError, match="2F0 waits for 1F0, which it depends on and which device 1 has not run"):
        run.require()


def test_blocks_on_several_devices_in_another_order_on_each_get_stuck():
    plan = SchedPlan(2)
    one, two = Block(0, 1, 0, "forward", stage=0), Block(0, 1, 0, "forward", stage=1)
    plan.add_block(one, [0, 1], 0)
    plan.add_block(two, [0, 1], 1)
    assert simulate(plan).completed
    Block.make_dependency(two, one)
    run = simulate(plan)
    assert not run.completed
    assert run.makespan == 0
    assert "0F0 waits for 1F0" in str(run)


def test_a_dependency_that_is_not_in_the_plan_is_named():
    plan = placement("vshape", 2)
    Block.make_dependency(Block(0, 1, 0, "forward", stage=9), next(iter(plan)))
    run = simulate(plan)
    assert "0F0 waits for 9F0, which is not in the plan" in str(run)


def test_an_empty_plan_takes_no_time():
    run = simulate(SchedPlan(2))
    assert (run.makespan, run.idle, run.peak_memory) == (0, (0.0, 0.0), (0, 0))


@pytest.mark.parametrize(
    "options", [{"jitter": 1}, {"jitter": -0.1}, {"spans": {0: -1}}, {"links": Links(((0, 1), (1, 0)))}]
)
def test_odd_options_are_refused(options):
    with pytest.raises(PlacementError, match="→"):
        simulate(placement("vshape", 3), **options)
