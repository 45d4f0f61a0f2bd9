"""Unrolling equals composing and is valid and monotone for every number of micro-batches."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import placements

from gemini.errors import ScheduleError
from gemini.schedule import Block, Composer, Links, SchedPlan
from gemini.schedule.placement_problem import make_problem, number_blocks
from gemini.schedule.placements import placement
from gemini.schedule.plan_files import to_dict
from gemini.schedule.search.sequential import least_memory_order
from gemini.schedule.simulate import simulate

EFFORT = {"time_limit": 0.3}


def memory_for(plan: SchedPlan, extra: list[int]) -> list[float]:
    """What one micro-batch at a time needs, and some more."""
    problem = make_problem(number_blocks(plan), [1e9] * plan.ndevs, plan.links)
    return [peak + more for peak, more in zip(least_memory_order(problem).peaks, extra)]


def keeps_the_rules(plan: SchedPlan, memory: list[float]) -> bool:
    """A second opinion, written from the rules: dependencies, one block at a time, memory."""
    slack = 1e-6
    ends = {block: plan.step(block) + block.span for block in plan}
    for block in plan:
        if any(plan.step(block) < ends[prev] + plan.delay(prev, block) - slack for prev in block.before):
            return False
    for dev, limit in enumerate(memory):
        here = sorted((block for block in plan if dev in plan.device(block)), key=plan.step)
        held = 0.0
        keeps = any(block.memory < 0 for block in plan)
        for block, following in zip(here, [*here[1:], None]):
            held = held + block.memory if keeps else block.memory
            if held > limit + slack or (following is not None and plan.step(following) < ends[block] - slack):
                return False
    return True


def check_plan(shape: SchedPlan, extra: list[int]) -> None:
    """What must hold of every composed plan, and of what it unrolls to."""
    memory = memory_for(shape, extra)
    plan = Composer.compose(shape, memory, **EFFORT)  # type: ignore[arg-type]
    assert plan.proof is not None
    assert plan.proof.lower_bound <= plan.proof.period * (1 + 1e-9)
    last = 0.0
    for nmicros in (1, 2, 3, 4, 5, 8):
        unrolled = plan.unroll(nmicros).validate()
        assert unrolled.nmicros == nmicros
        assert keeps_the_rules(unrolled, memory)
        assert unrolled.nsteps >= last - 1e-9
        last = unrolled.nsteps
        assert simulate(unrolled).makespan == pytest.approx(unrolled.nsteps)


ROOM = st.lists(st.integers(0, 4), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(placements(reals=True, links=True), ROOM)
def test_every_plan_is_valid_and_more_micro_batches_never_take_less_time(shape: SchedPlan, extra: list[int]) -> None:
    check_plan(shape, extra)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
def test_the_same_of_thousands_of_placements(seed: int) -> None:
    @hypothesis.seed(seed)
    @settings(max_examples=400, deadline=None, database=None)
    @given(placements(reals=True, links=True), ROOM)
    def check(shape: SchedPlan, extra: list[int]) -> None:
        check_plan(shape, extra)

    check()


@settings(max_examples=25, deadline=None)
@given(placements(), st.lists(st.integers(0, 3), min_size=4, max_size=4), st.integers(1, 7))
def test_unrolling_equals_composing(shape: SchedPlan, extra: list[int], nmicros: int) -> None:
    memory = memory_for(shape, extra)
    unrolled = Composer.compose(shape, memory, max_kernel=2).unroll(nmicros)
    composed = Composer.compose(shape, memory, max_kernel=2, nmicros=nmicros)
    assert to_dict(unrolled)["blocks"] == to_dict(composed)["blocks"]
    assert unrolled.pattern == composed.pattern


@pytest.mark.parametrize("name", ["vshape", "xshape", "mshape", "kshape", "nnshape", "finetune", "alphafold"])
def test_named_placements_grow_with_every_micro_batch(name: str) -> None:
    plan = Composer.compose(placement(name, 4), 6)
    spans = [plan.unroll(nmicros).nsteps for nmicros in range(1, 20)]
    assert spans == sorted(spans)
    assert plan.proof is not None
    assert spans[-1] - spans[-2] <= 2 * plan.proof.period


@pytest.mark.parametrize("name", ["vchunks", "interleaved", "vshape"])
def test_split_backward_grows_with_every_micro_batch(name: str) -> None:
    plan = Composer.compose(placement(name, 4, split=True), 8)
    spans = [plan.unroll(nmicros).nsteps for nmicros in range(1, 24)]
    assert spans == sorted(spans)


def test_the_steady_state_takes_the_period() -> None:
    plan = Composer.compose(placement("mshape", 4), 6)
    assert plan.proof is not None
    assert plan.unroll(60).nsteps - plan.unroll(50).nsteps == 10 * plan.proof.period


def test_real_spans_links_and_unequal_devices_come_close_to_the_bound() -> None:
    chance = random.Random(5)
    gaps = []
    for name in ("vshape", "xshape", "mshape", "kshape", "nnshape", "alphafold"):
        for ndevs in (4, 8, 16):
            shape = placement(name, ndevs)
            speed = [chance.uniform(0.7, 1.3) for _ in range(ndevs)]
            unequal = SchedPlan(ndevs)
            twins = {}
            for block in shape:
                factor = chance.uniform(0.7, 1.3) * max(speed[dev] for dev in shape.device(block))
                twins[block] = Block(0, block.span * factor, block.memory, block.btype, stage=block.stage)
                unequal.add_block(twins[block], shape.device(block), shape.step(block))
            for block, twin in twins.items():
                for prev in block.before:
                    Block.make_dependency(twins[prev], twin)
            links = Links(latency=chance.uniform(0, 0.25))
            plan = Composer.compose(unequal, 1.5 * ndevs, links=links, time_limit=5).validate()
            assert plan.proof is not None
            gaps.append(plan.proof.gap)
    assert sum(gap <= 0.01 for gap in gaps) >= 0.9 * len(gaps)


def test_only_composed_plans_unroll() -> None:
    with pytest.raises(ScheduleError, match="no steady state"):
        placement("vshape", 4).unroll(3)
    with pytest.raises(ScheduleError, match="1 or more"):
        Composer.compose(placement("vshape", 4), 4).unroll(0)
