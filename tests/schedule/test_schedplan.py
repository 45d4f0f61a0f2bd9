"""Plans as values: construction, queries, derivation."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements, plans

from gemini.errors import InvalidPlanError, PlacementError, ScheduleError
from gemini.schedule import Block, Pattern, SchedPlan
from gemini.schedule.earliest_times import earliest_starts
from gemini.schedule.library import LIBRARY, library, library_on
from gemini.schedule.placements import placement
from gemini.schedule.plan_files import to_dict
from gemini.schedule.simulate import simulate

ANY = {"reals": True, "links": True}


def forward(**options: object) -> Block:
    return Block(0, 1, 1, "forward", **options)


def test_add_block_on_one_device_or_several():
    plan = SchedPlan(3)
    one = plan.add_block(forward(), 1, 0)
    all_of_them = plan.add_block(forward(), [0, 1, 2], 1.5)
    assert (plan.device(one), plan.device(all_of_them)) == ((1,), (0, 1, 2))
    assert (plan.step(one), plan.step(all_of_them), plan.nsteps) == (0, 1.5, 2.5)
    assert (one.gid, all_of_them.gid, one.stage, all_of_them.stage) == (0, 1, 0, 1)
    assert plan.blocks(1.5) == [all_of_them]
    assert plan.blocks(1) == []
    assert one in plan
    assert forward() not in plan
    assert len(plan) == 2


@pytest.mark.parametrize("device", [-1, 3, [], [0, 0], [0, 3], 0.5, [0.5], "x", None])
def test_devices_that_do_not_exist_are_refused(device):
    plan = SchedPlan(3)
    with pytest.raises(PlacementError, match="name one or more different devices from 0 to 2"):
        plan.add_block(forward(), device, 0)
    assert len(plan) == 0


@pytest.mark.parametrize("step", [-1, float("nan"), float("inf"), "1", None])
def test_times_that_are_none_are_refused(step):
    with pytest.raises(PlacementError, match="give a finite time, 0 or more"):
        SchedPlan(1).add_block(forward(), 0, step)


@pytest.mark.parametrize("ndevs", [0, -1, 1.5, True, "4", None])
def test_a_plan_needs_devices(ndevs):
    with pytest.raises(PlacementError, match="give a number of devices, 1 or more"):
        SchedPlan(ndevs)


def test_a_block_is_added_once():
    plan = SchedPlan(2)
    block = plan.add_block(forward(), 0, 0)
    with pytest.raises(PlacementError, match="already in the plan at 0"):
        plan.add_block(block, 0, 1)
    with pytest.raises(PlacementError, match=r"on devices \[1\] is already on \[0\]"):
        plan.add_block(block, 1, 1)


def test_numbers_are_given_without_collisions():
    plan = SchedPlan(1)
    gids = [plan.add_block(forward(gid=gid), 0, step).gid for step, gid in enumerate((None, 2, None, None))]
    assert gids == [0, 2, 3, 4] or len(set(gids)) == 4


# -------------------------------------------------------------------- sequences


def test_a_chain_follows_itself_and_none_is_an_idle_step():
    plan = SchedPlan(2)
    blocks = [Block(0, 2, 1, "Forward"), None, Block(0, 1, 1, "Forward"), None, None, Block(0, 3, -1, "Backward")]
    plan.add_block_seq(blocks, [[0], None, [1], [], 7, [1]])
    real = [block for block in blocks if block]
    assert [plan.step(block) for block in real] == [0, 3, 6]
    assert [list(block.before) for block in real] == [[], [real[0]], [real[1]]]
    assert [str(block) for block in real] == ["0F0", "1F0", "1B0"]


def test_a_fault_in_a_chain_leaves_the_plan_as_it_was():
    plan = SchedPlan(2)
    with pytest.raises(PlacementError, match=r"on devices \[2\]"):
        plan.add_block_seq([forward(), forward()], [0, 2])
    with pytest.raises(PlacementError, match="2 blocks for 1 device entries"):
        plan.add_block_seq([forward(), forward()], [0])
    assert len(plan) == 0


def test_branches_meet_in_a_shared_block():
    """The K shape as two chains through the same joint blocks."""
    plan = SchedPlan(4)
    joint = [Block(0, 1, 1, "forward"), Block(0, 1, -1, "backward")]
    for devices in ((0, 1), (2, 3)):
        down = [Block(0, 1, 1, "forward") for _ in devices]
        up = [Block(0, 3, -1, "backward") for _ in devices]
        everywhere = [range(4), range(4)]
        plan.add_block_seq([*down, *joint, *up], [*devices, *everywhere, *devices[::-1]])
    assert len(plan) == 10
    plan.validate()
    own = placement("kshape", 4)
    assert sorted((plan.step(b), plan.device(b), b.btype) for b in plan) == sorted(
        (own.step(b), own.device(b), b.btype) for b in own
    )
    late = [forward(), forward(), forward(), joint[0]]
    with pytest.raises(PlacementError, match="this chain reaches it only at 3\n    → add the longer chain first"):
        plan.add_block_seq(late, [0, 0, 0, range(4)])


@pytest.mark.parametrize(
    "name", ["vshape", "mshape", "nnshape", "mllm", "finetune", "alphafold", "interleaved", "vchunks"]
)
def test_stages_are_guessed_as_the_named_placements_have_them(name):
    own = placement(name, 4)
    chain = own.chain_blocks()
    plan = SchedPlan(4)
    plan.add_block_seq([Block(0, b.span, b.memory, b.btype) for b in chain], [own.device(b) for b in chain])
    assert [str(block) for block in plan] == [str(block) for block in chain]


# ---------------------------------------------------------------------- looking


@given(plans(**ANY))
def test_looking_is_consistent(plan):
    blocks = plan.all_blocks()
    assert sorted(map(id, blocks)) == sorted(map(id, plan))
    assert [plan.step(block) for block in blocks] == sorted(plan.step(block) for block in plan)
    for dev in range(plan.ndevs):
        assert plan.device_blocks(dev) == [block for block in blocks if dev in plan.device(block)]
        levels = [sum(b.memory for b in plan.device_blocks(dev)[: i + 1]) for i in range(len(plan.device_blocks(dev)))]
        assert plan.peak_memory(dev) == pytest.approx(max([0, *levels]))
    for step in {plan.step(block) for block in plan}:
        assert set(plan.blocks(step)) == {block for block in plan if plan.step(block) == step}
    position = {block: index for index, block in enumerate(plan.chain_blocks())}
    assert len(position) == len(plan)
    assert all(position[prev] < position[block] for block in plan for prev in block.before)


def test_in_inference_a_block_has_its_memory_only_while_it_runs():
    plan = library_on("gpipe", placement("vshape", 2, train=False, memory=3), 8)
    assert [plan.peak_memory(dev) for dev in range(2)] == [3, 3]
    assert simulate(plan).peak_memory == (3, 3)
    plan.validate(memory=3)
    with pytest.raises(InvalidPlanError, match="device 0 holds 3 of 2 once 0F0 starts at 0"):
        plan.validate(memory=2)
    plan.placement = None  # a plan written by hand: nobody said that it is inference
    assert plan.peak_memory(0) == 24


@pytest.mark.parametrize("dev", [-1, 2])
def test_a_device_that_does_not_exist_has_no_blocks(dev):
    for look in (SchedPlan(2).device_blocks, SchedPlan(2).peak_memory):
        with pytest.raises(PlacementError, match=f"device {dev} of a plan with 2"):
            look(dev)


def test_what_was_looked_up_stays_right_when_blocks_are_added():
    plan = placement("vshape", 2)
    before = plan.all_blocks()
    block = plan.add_block(forward(), 0, 0.5)
    assert block in plan.all_blocks()
    assert block in plan.device_blocks(0)
    assert block not in before


def test_a_cycle_is_named():
    plan = SchedPlan(1)
    one, two = (plan.add_block(forward(), 0, step) for step in range(2))
    Block.make_dependency(one, two)
    Block.make_dependency(two, one)
    with pytest.raises(PlacementError, match="depend on each other in a cycle: 0F0, 1F0"):
        plan.chain_blocks()


# --------------------------------------------------------------------- deriving


@given(plans(**ANY))
def test_a_copy_is_equal_and_apart(plan):
    copy = plan.copy()
    assert to_dict(copy) == to_dict(plan)
    assert not set(copy) & set(plan)
    copy.add_block(Block(0, 1, 0, "forward"), 0, 0)
    assert len(copy) == len(plan) + 1


@given(placements(**ANY), st.integers(0, 9))
def test_a_copy_of_a_placement_may_be_another_micro_batch(plan, mid):
    copy = plan.copy(mid)
    assert {block.mid for block in copy} == {mid}
    assert [block.gid for block in copy] == [block.gid for block in plan]
    copy.validate()


def test_several_micro_batches_cannot_become_one():
    plan = SchedPlan(1)
    for mid in range(2):
        plan.add_block(Block(mid, 1, 0, "forward"), 0, mid)
    with pytest.raises(PlacementError, match="2 micro-batches cannot all be micro-batch 5"):
        plan.copy(5)


@given(plans(**ANY), st.integers(0, 5), st.integers(0, 9))
def test_extract_takes_what_starts_inside(plan, start, end):
    part = plan.extract(start, end)
    inside = [block for block in plan if start <= plan.step(block) < end]
    assert [str(block) for block in part] == [str(block) for block in inside]
    assert [part.step(block) for block in part] == [plan.step(block) - start for block in inside]
    edges = {(str(prev), str(block)) for block in inside for prev in block.before if prev in set(inside)}
    assert {(str(prev), str(block)) for block in part for prev in block.before} == edges
    assert part.pattern is None


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("nmicros", [1, 3, 7, 8])
def test_the_first_micro_batches_keep_their_order(name, nmicros):
    plan = library(name, 2, 8)
    part = plan.first(nmicros).validate()
    assert part.nmicros == nmicros
    assert part.nsteps <= plan.nsteps
    for dev in range(plan.ndevs):
        kept = [str(block) for block in plan.device_blocks(dev) if block.mid < nmicros]
        assert [str(block) for block in part.device_blocks(dev)] == kept


@pytest.mark.parametrize("nmicros", [0, 9])
def test_there_are_no_other_first_ones(nmicros):
    with pytest.raises(
        PlacementError, match=f"the first {nmicros} of 8 micro-batches\n    → give a number from 1 to 8"
    ):
        library("1f1b", 2, 8).first(nmicros)


@given(plans(**ANY), st.integers(0, 7))
def test_shift_moves_all_alike_and_back(plan, distance):
    plan.pattern = Pattern(3, 1, ((0, 1),))
    later = plan.shift(distance)
    assert [later.step(block) for block in later] == [plan.step(block) + distance for block in plan]
    assert later.pattern.start(1, 4) == plan.pattern.start(1, 4) + distance
    back = later.shift(-distance)
    assert [back.step(block) for block in back] == pytest.approx([plan.step(block) for block in plan])


def test_nothing_moves_before_the_beginning():
    with pytest.raises(PlacementError, match="give a finite time, 0 or more"):
        placement("vshape", 2).shift(-1)


@given(plans(**ANY), st.integers(1, 5))
def test_tighten_takes_out_slack_and_keeps_the_order(plan, stretch):
    loose = plan.retimed({block: plan.step(block) * stretch for block in plan})
    tight = loose.tighten().validate()
    assert tight.nsteps <= plan.nsteps * (1 + 1e-9)
    for dev in range(plan.ndevs):
        assert [str(block) for block in tight.device_blocks(dev)] == [str(block) for block in plan.device_blocks(dev)]
    again = tight.tighten()
    assert [again.step(block) for block in again] == pytest.approx([tight.step(block) for block in tight])


def test_an_order_that_cannot_be_kept_is_a_deadlock():
    plan = SchedPlan(1)
    one, two = (plan.add_block(forward(), 0, step) for step in range(2))
    Block.make_dependency(two, one)
    with pytest.raises(InvalidPlanError, match=r"deadlock: .*0F0, 1F0\n    → simulate"):
        earliest_starts(plan)


def test_a_pattern_says_when_every_copy_starts():
    pattern = Pattern(8, 2, ((0, 5), (3, 9)))
    assert pattern.period == 4
    assert [pattern.start(1, mid) for mid in range(4)] == [5, 9, 13, 17]


def test_a_plan_without_a_steady_state_says_so():
    plan = placement("vshape", 2)
    assert plan.repetend is None
    with pytest.raises(ScheduleError, match="no steady state to repeat\n    → compose one"):
        plan.unroll(4)


def test_importing_schedules_imports_no_framework():
    code = (
        "import sys, gemini.schedule, gemini.schedule.library, gemini.schedule.placements,"
        " gemini.schedule.device_orders, gemini.schedule.placement_file, gemini.schedule.validate,"
        " gemini.schedule.simulate, gemini.schedule.plan_files, gemini.schedule.text_grid;"
        "print([name for name in ('torch', 'tensorflow', 'numpy', 'ortools', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
