"""Known schedules have the makespan, memory and idle time the literature gives them, for all sizes they admit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.errors import InvalidPlanError, PlacementError
from gemini.schedule import Block, SchedPlan
from gemini.schedule.library import LIBRARY, library, library_for, library_on
from gemini.schedule.library.interleaved import split_evenly
from gemini.schedule.placements import PLACEMENTS, placement
from gemini.schedule.simulate import simulate

SIZES = [(ndevs, nmicros) for ndevs in (1, 2, 3, 4, 6, 8) for nmicros in (1, 2, 3, 5, 8, 9, 15, 16, 24)]


def peak(plan: SchedPlan) -> float:
    return max(plan.peak_memory(dev) for dev in range(plan.ndevs))


def waits(plan: SchedPlan) -> float:
    """The longest that any device is idle between its first block and its last."""
    idle = []
    for dev in range(plan.ndevs):
        blocks = plan.device_blocks(dev)
        lasts = plan.step(blocks[-1]) + blocks[-1].span - plan.step(blocks[0])
        idle.append(lasts - sum(block.span for block in blocks))
    return max(idle)


spans = st.one_of(st.integers(1, 4), st.floats(0.5, 3).map(lambda x: round(x, 3)))


@settings(max_examples=150)
@given(st.sampled_from(sorted(LIBRARY)), st.integers(1, 8), st.integers(1, 20), st.integers(2, 4), st.data())
def test_every_schedule_is_valid_for_every_size_it_admits(name, ndevs, nmicros, chunks, data):
    known = LIBRARY[name]
    shape = PLACEMENTS[known.placement]
    chunks = known.chunks or (chunks if shape.chunked else 1)
    if not shape.admits(ndevs) or not known.admits(ndevs, nmicros, chunks):
        with pytest.raises(PlacementError, match="does not exist for"):
            library(name, ndevs, nmicros)
        return
    kinds = ("forward", "backward", "input_gradient", "weight_gradient")
    options = {kind: data.draw(spans) for kind in kinds}
    if shape.chunked:
        options["chunks"] = chunks
    plan = library(name, ndevs, nmicros, **options).validate()
    assert plan.nmicros == nmicros
    assert len(plan) == nmicros * len(plan.placement)
    assert simulate(plan).makespan == pytest.approx(plan.nsteps)
    work = max(sum(block.span for block in plan.device_blocks(dev)) for dev in range(ndevs))
    assert plan.nsteps >= work * (1 - 1e-9)
    assert name in library_for(plan.placement, nmicros)


@pytest.mark.parametrize(("ndevs", "nmicros"), SIZES)
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 3), (1, 1)])
def test_gpipe_and_1f1b(ndevs, nmicros, forward, backward):
    gpipe = library("gpipe", ndevs, nmicros, forward=forward, backward=backward)
    one = library("1f1b", ndevs, nmicros, forward=forward, backward=backward)
    assert gpipe.nsteps == one.nsteps == (nmicros + ndevs - 1) * (forward + backward)
    assert {gpipe.peak_memory(dev) for dev in range(ndevs)} == {nmicros}
    assert [one.peak_memory(dev) for dev in range(ndevs)] == [min(nmicros, ndevs - dev) for dev in range(ndevs)]


@pytest.mark.parametrize(("ndevs", "nmicros"), [size for size in SIZES if size[1] >= size[0]])
@pytest.mark.parametrize("chunks", [2, 3])
def test_looped_schedules_have_the_bubble_of_one_chunk(ndevs, nmicros, chunks):
    ideal = (nmicros * chunks + ndevs - 1) * 3
    assert library("looped_bfs", ndevs, nmicros, chunks=chunks).nsteps == ideal
    interleaved = library("interleaved_1f1b", ndevs, nmicros, chunks=chunks)
    assert interleaved.nsteps == ideal
    if nmicros % ndevs == 0:
        first = (chunks - 1) * ndevs + 2 * (ndevs - 1) + 1
        assert interleaved.peak_memory(0) == min(first, nmicros * chunks)


def test_zero_bubble_h1_is_optimal_where_that_is_proven():
    assert library("zb_h1", 4, 8).nsteps == 27
    assert library("zb_h1", 4, 12).nsteps == 39


@pytest.mark.parametrize(("ndevs", "nmicros"), SIZES)
def test_zero_bubble(ndevs, nmicros):
    h1, h2 = library("zb_h1", ndevs, nmicros), library("zb_h2", ndevs, nmicros)
    assert peak(h1) == min(nmicros, ndevs)
    assert peak(h2) == min(nmicros, 2 * ndevs - 1)
    if nmicros >= ndevs:
        assert h1.nsteps == 3 * nmicros + ndevs - 1
    if nmicros >= 2 * ndevs - 1:
        assert h2.nsteps == 3 * nmicros + ndevs - 1
        assert waits(h2) == 0
        assert waits(h1) == ndevs - 1


@pytest.mark.parametrize(("ndevs", "nmicros"), SIZES)
def test_zb_v_never_waits_in_the_memory_of_1f1b(ndevs, nmicros):
    plan = library("zb_v", ndevs, nmicros)
    assert peak(plan) == 2 * min(nmicros, ndevs)
    if nmicros >= 2 * ndevs - 1:
        assert waits(plan) == 0
        assert plan.nsteps == 6 * nmicros + ndevs - 1


@pytest.mark.parametrize(("ndevs", "nmicros"), [size for size in SIZES if size[1] >= 2 * size[0]])
def test_dualpipe_v_reaches_the_bound_with_one_more_than_1f1b(ndevs, nmicros):
    plan = library("dualpipe_v", ndevs, nmicros)
    assert plan.nsteps == 6 * nmicros + ndevs - 1
    assert {plan.peak_memory(dev) for dev in range(ndevs)} == {2 * ndevs + 1}


@pytest.mark.parametrize("ndevs", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_chimera_waits_for_two_slots_less_than_the_devices(ndevs, units):
    pairs = units * ndevs // 2
    plan = library("chimera", ndevs, pairs, backward=1)
    assert plan.nsteps == 4 * pairs + ndevs - 2
    assert peak(plan) == ndevs
    if ndevs > 2:
        one_way = library("1f1b", ndevs, 2 * pairs, backward=1)
        assert plan.nsteps < one_way.nsteps


@given(st.integers(1, 50), st.integers(1, 10))
def test_groups_are_even_and_whole(nmicros, ngroups):
    groups = split_evenly(nmicros, ngroups)
    assert [mid for group in groups for mid in group] == list(range(nmicros))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1


# ------------------------------------------------------------- placements of one's own


@given(st.sampled_from(sorted(PLACEMENTS)), st.booleans(), st.booleans(), st.integers(1, 6))
def test_gpipe_runs_on_every_placement(name, train, split, nmicros):
    plan = library_on("gpipe", placement(name, 4, train, split=split), nmicros)
    assert plan.nmicros == nmicros


def test_which_schedules_run_on_a_placement():
    assert library_for(placement("vshape", 4)) == ["gpipe", "1f1b"]
    assert library_for(placement("vshape", 4, split=True)) == ["gpipe", "zb_h1", "zb_h2"]
    assert library_for(placement("vchunks", 4, split=True)) == ["gpipe", "zb_v", "dualpipe_v"]
    assert library_for(placement("vchunks", 4, split=True), nmicros=4) == ["gpipe", "zb_v"]
    assert library_for(placement("interleaved", 4)) == ["gpipe", "interleaved_1f1b", "looped_bfs"]
    assert library_for(placement("interleaved", 4, split=True)) == ["gpipe", "interleaved_zb"]
    assert library_for(placement("xshape", 4)) == ["gpipe", "chimera"]
    assert library_for(placement("xshape", 4, split=True)) == ["gpipe"]
    assert library_for(placement("vchunks", 4)) == ["gpipe"]
    assert library_for(placement("mshape", 4)) == ["gpipe"]


def test_a_hand_made_placement_is_recognised_and_keeps_its_spans():
    plan = SchedPlan(2)
    blocks = [Block(0, span, 1, "forward") for span in (1.5, 2.5)] + [Block(0, 3, -1, "backward") for _ in range(2)]
    plan.add_block_seq(blocks, [0, 1, 1, 0])
    Block.make_dependency(blocks[0], blocks[3])  # a forward and its own backward: true already, and harmless
    one = library_on("1f1b", plan, 4)
    assert {block.span for block in one.device_blocks(1)} == {2.5, 3}
    assert one.placement is plan


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: library("1f1", 4, 8), r"did you mean '1f1b'\? choose from gpipe, 1f1b"),
        (lambda: library("dualpipe_v", 4, 7), "it needs at least twice as many micro-batches as devices"),
        (lambda: library("chimera", 3, 7), "it needs an even number of devices"),
        (lambda: library("interleaved_1f1b", 4, 8, chunks=1), r"with one chunk it is 1f1b"),
        (lambda: library("zb_v", 4, 8, chunks=3), "3 chunks for zb_v\n    → it has 2: leave chunks out"),
        (lambda: library("1f1b", 4, 8, chunks=2), "which has one stage per device"),
        (lambda: library("1f1b", 4, 0), "0 micro-batches"),
        (lambda: library("1f1b", 0, 4), "does not exist for 0 devices"),
        (lambda: library_on("1f1b", placement("mshape", 4), 4), "it runs on vshape; on this one run: gpipe"),
    ],
)
def test_what_does_not_exist_says_what_does(call, text):
    with pytest.raises(PlacementError, match=text):
        call()


def test_a_placement_whose_memory_is_too_small_for_the_schedule_is_refused():
    small = placement("vshape", 4)
    small.memory = (2, 2, 2, 2)
    with pytest.raises(InvalidPlanError, match="memory: device 0 holds 3 of 2"):
        library_on("1f1b", small, 4)
    assert library_for(small, 4) == []
