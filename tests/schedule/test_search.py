"""Each search method agrees with its rules or with brute force."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import placements

from gemini.cpsat_library import has_cpsat
from gemini.schedule import SchedPlan
from gemini.schedule.bounds import makespan_bound, period_bound
from gemini.schedule.link_costs import FREE
from gemini.schedule.placement_problem import PlacementProblem, make_problem, memory_limits, number_blocks
from gemini.schedule.placements import placement
from gemini.schedule.search.beam_search import Budget, Effort, beam_search
from gemini.schedule.search.compact import tightest
from gemini.schedule.search.cpsat_model import solve_kernel
from gemini.schedule.search.kernel import Kernel, keeps_rules, normalise, steady_peak
from gemini.schedule.search.list_scheduler import list_schedule
from gemini.schedule.search.modulo_table import Room, Wish, can_pack, gaps, occupy, positions
from gemini.schedule.search.nested_order import placings
from gemini.schedule.search.sequential import find_order, least_memory_order, sequential_kernel
from gemini.schedule.search.warmup_cooldown import Ramps, compact_listing, within_memory


def problem_of(plan: SchedPlan, memory: float | None = None) -> PlacementProblem:
    plan = number_blocks(plan)
    return make_problem(plan, memory_limits(memory, plan.ndevs), plan.links)


def kernel_at(problem: PlacementProblem, length: int, width: int = 16) -> Kernel | None:
    for placing in placings(problem):
        kernel = beam_search(problem, length, placing, {}, Effort(width, 4), budget=Budget())
        if kernel is not None:
            return kernel
    return None


# ------------------------------------------------------------------------ circles


@given(st.lists(st.integers(1, 6), max_size=5), st.lists(st.integers(1, 6), max_size=5))
def test_packing_agrees_with_trying_all_assignments(sizes: list[int], spans: list[int]) -> None:
    expected = any(
        all(sum(span for span, gap in zip(spans, choice) if gap == index) <= size for index, size in enumerate(sizes))
        for choice in itertools.product(range(len(sizes)), repeat=len(spans))
    )
    assert can_pack(tuple(sorted(sizes)), tuple(sorted(spans, reverse=True))) == expected


def test_gaps_go_around_the_circle() -> None:
    occupied = occupy(occupy((), 0, 1), 4, 3)
    assert gaps(occupied, 8) == [(1, 3), (7, 1)]
    assert gaps((), 8) == [(0, 8)]


def test_a_block_leaves_room_for_those_to_come() -> None:
    room = Room(((0, 1),), (3,), 8)  # a block of three is still to come to the seven that are free
    times = [time for _, time in positions([room], 4, Wish(2, None), 8)]
    assert times
    assert all(time % 8 in (1, 4) for time in times)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 12))
def test_a_wish_is_met_at_the_closest_time(low: int, offset: int, length: int) -> None:
    found = Wish(low, None).time(offset, length)
    assert found is not None
    distance, time = found
    assert time - low == distance < length
    assert (time - offset) % length == 0


# ------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("name", "memory", "bound"),
    [
        ("vshape", 3, Fraction(16, 3)),
        ("vshape", 3.9, Fraction(16, 3)),
        ("mshape", 1, Fraction(18)),
        ("mshape", 3, Fraction(22, 3)),
        ("nnshape", 2, Fraction(12)),
        ("nnshape", 100, Fraction(8)),
    ],
)
def test_period_bounds(name: str, memory: float, bound: Fraction) -> None:
    assert period_bound(problem_of(placement(name, 4), memory)) == bound


def test_three_blocks_that_pairwise_share_a_device_take_turns() -> None:
    from gemini.schedule import Block

    plan = SchedPlan(3)
    for devices in ((0, 1), (1, 2), (0, 2)):
        plan.add_block(Block(0, 2, 0, "f"), devices, 0)
    assert period_bound(problem_of(plan)) == 6


@settings(max_examples=40, deadline=None)
@given(placements(max_blocks=6), st.integers(1, 3))
def test_no_schedule_beats_the_makespan_bound(shape: SchedPlan, nmicros: int) -> None:
    problem = problem_of(shape)
    ramp = Ramps(problem, sequential_kernel(problem, problem.topological)).schedule(nmicros)
    assert ramp.listing.makespan >= makespan_bound(problem, nmicros)


# ------------------------------------------------------------------------ kernels


@settings(max_examples=60, deadline=None)
@given(placements(), st.floats(1.0, 2.0), st.integers(0, 3))
def test_beam_kernels_keep_the_rules(shape: SchedPlan, stretch: float, extra: int) -> None:
    free = problem_of(shape)
    problem = free.with_caps([peak + extra for peak in least_memory_order(free).peaks])
    length = int(period_bound(problem) * Fraction(stretch)) + 1
    kernel = kernel_at(problem, length)
    if kernel is not None:
        assert keeps_rules(problem, kernel)
        assert keeps_rules(problem, normalise(problem, kernel))
        tighter = tightest(problem, kernel, 8)
        assert period_bound(problem) <= tighter.period <= kernel.period
        assert keeps_rules(problem.times(tighter.copies), tighter)


def test_a_broken_kernel_is_seen() -> None:
    problem = problem_of(placement("vshape", 2), 2)
    kernel = kernel_at(problem, 4)
    assert kernel is not None
    assert keeps_rules(problem, kernel)
    assert not keeps_rules(problem, Kernel(3, kernel.starts))
    assert not keeps_rules(problem, Kernel(4, tuple(reversed(kernel.starts))))
    assert not keeps_rules(problem.with_caps([1, 1]), kernel)
    assert steady_peak(problem, 4, kernel.starts, 0) == 2


def test_an_order_that_allows_a_fraction_becomes_a_larger_kernel() -> None:
    """Three devices in a ring of waits: the order alone allows 16/3, not a whole number."""
    problem = problem_of(placement("vshape", 4), 3).times(3)
    kernel = kernel_at(problem, 17)
    assert kernel is not None
    assert tightest(problem, kernel, 12).period <= kernel.period


@settings(max_examples=40, deadline=None)
@given(placements(max_blocks=7))
def test_the_least_memory_order_is_least(shape: SchedPlan) -> None:
    problem = problem_of(shape, 1)
    found = least_memory_order(problem)
    assert sorted(found.order) == list(range(problem.nblocks))

    def worst(order: tuple[int, ...]) -> float:
        held = [0.0] * problem.ndevs
        peak = 0.0
        for block in order:
            for dev in problem.devices[block]:
                held[dev] += problem.memory[block]
                peak = max(peak, held[dev])
        return peak

    orders = (
        order
        for order in itertools.permutations(range(problem.nblocks))
        if all(order.index(prev) < order.index(block) for block in order for prev, _ in problem.before[block])
    )
    if problem.nblocks <= 5:
        assert worst(found.order) == min(worst(order) for order in orders)


# ---------------------------------------------------------------- whole schedules


@settings(max_examples=60, deadline=None)
@given(placements(), st.integers(1, 5), st.integers(0, 2), st.sampled_from((0, 50, 100)))
def test_list_schedules_never_deadlock_and_stay_within_memory(
    shape: SchedPlan, nmicros: int, extra: int, patience: int
) -> None:
    free = problem_of(shape)
    problem = free.with_caps([peak + extra for peak in least_memory_order(free).peaks])
    reference = find_order(problem).order
    priority = [[float(mid * 7 + block) for mid in range(nmicros)] for block in range(problem.nblocks)]
    listing = list_schedule(problem, priority, reference, patience)
    assert listing is not None
    assert within_memory(problem, listing.starts)
    assert compact_listing(problem, listing.starts).makespan <= listing.makespan


@pytest.mark.skipif(not has_cpsat(), reason="needs OR-tools")
@pytest.mark.parametrize(("name", "memory", "length"), [("kshape", 2, 8), ("xshape", 4, 8), ("nnshape", 2, 12)])
def test_the_solver_finds_tight_kernels(name: str, memory: int, length: int) -> None:
    problem = problem_of(placement(name, 4), memory)
    kernel = solve_kernel(problem, length, 5, 30, 0)
    assert kernel is not None
    assert keeps_rules(problem, kernel)
    assert solve_kernel(problem, length - 1, 2, 30, 0) is None


def test_decimal_and_real_times_become_integers_that_never_undercut_them() -> None:
    from gemini.schedule import Block

    plan = SchedPlan(1)
    plan.add_block_seq([Block(0, 0.25, 0, "f"), Block(0, 1.5, 0, "f")], [[0], [0]])
    exact = make_problem(number_blocks(plan), None, FREE)
    assert exact.span == (1, 6)
    assert exact.real(7) == 1.75
    plan = SchedPlan(1)
    plan.add_block_seq([Block(0, 2**0.5, 0, "f"), Block(0, 3**0.5, 0, "f")], [[0], [0]])
    real = make_problem(number_blocks(plan), None, FREE)
    assert all(real.real(ticks) >= span for ticks, span in zip(real.span, (2**0.5, 3**0.5)))
    assert real.real(sum(real.span)) == pytest.approx(2**0.5 + 3**0.5, rel=1e-8)
