"""Unrolling: a composed schedule for any number of micro-batches.

The plan holds all inputs: placement, memory, links and the steady state. So composing for N micro-batches and
unrolling to N are the same operation. The search works in integer time; a last pass computes the times of the plan
in the placement's own numbers, in which every block starts as soon as its device and its inputs allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial

from gemini.errors import ScheduleError
from gemini.schedule.block import Block, Number
from gemini.schedule.placement_problem import PlacementProblem, make_problem
from gemini.schedule.schedplan import Pattern, SchedPlan
from gemini.schedule.search.kernel import Kernel
from gemini.schedule.search.list_scheduler import Starts
from gemini.schedule.search.warmup_cooldown import Ramps


def unroll(plan: SchedPlan, nmicros: int) -> SchedPlan:
    """The plan's steady state with warm-up and cool-down for `nmicros` micro-batches."""
    placement, pattern = plan.placement, plan.pattern
    if placement is None or pattern is None:
        raise ScheduleError(
            "this plan has no steady state to repeat\n    → compose one: Composer.compose(placement, memory)"
        )
    if isinstance(nmicros, bool) or not isinstance(nmicros, int) or nmicros < 1:
        raise ScheduleError(
            f"a schedule for {nmicros!r} micro-batches\n    → give a number of micro-batches, 1 or more"
        )
    problem = make_problem(placement, plan.memory, plan.links)
    if pattern.rigid:
        wished = [[pattern.start(gid, mid) for mid in range(nmicros)] for gid in range(problem.nblocks)]
        unrolled = build_plan(plan, placement, wished)
        bound = None
    else:
        known = partial(_library_starts, placement)
        ramp = Ramps(problem, kernel_of(problem, pattern), known).schedule(nmicros)
        unrolled = build_plan(plan, placement, real_times(placement, plan, ramp.listing.starts))
        bound = problem.real(ramp.bound)
    if plan.proof is not None:
        # Sums of reals round: the makespan that is equal to the bound in exact time may be slightly below it.
        bound = None if bound is None else min(bound, unrolled.nsteps)
        unrolled.proof = replace(plan.proof, makespan=unrolled.nsteps, makespan_bound=bound)
    return unrolled


def _library_starts(placement: SchedPlan, nmicros: int) -> Iterator[list[list[Number]]]:
    """The known schedules that run on this placement: a composed plan must not be worse than any of them."""
    from gemini.schedule.library import library_for, library_on

    for name in library_for(placement):
        try:
            plan = library_on(name, placement, nmicros)
        except ScheduleError:  # it does not exist for this number of micro-batches
            continue
        starts: list[list[Number]] = [[0] * nmicros for _ in range(len(placement))]
        for block in plan:
            starts[block.gid or 0][block.mid] = plan.step(block)
        yield starts


def kernel_of(problem: PlacementProblem, pattern: Pattern) -> Kernel:
    """The steady state in the problem's integer time."""
    flat = [start for row in pattern.starts for start in row]
    return Kernel(_ticks(problem, pattern.length), tuple(_ticks(problem, start) for start in flat), pattern.nmicros)


def pattern_of(problem: PlacementProblem, kernel: Kernel, rigid: bool = False) -> Pattern:
    """The steady state in the placement's own time."""
    size = problem.nblocks
    rows = tuple(
        tuple(problem.real(start) for start in kernel.starts[copy * size : (copy + 1) * size])
        for copy in range(kernel.copies)
    )
    return Pattern(problem.real(kernel.length), kernel.copies, rows, rigid)


def real_times(placement: SchedPlan, plan: SchedPlan, starts: Starts) -> list[list[Number]]:
    """Starts in the placement's own numbers, in the order that the integer starts have on every device."""
    blocks = sorted(placement, key=lambda block: block.gid or 0)
    devices = [placement.device(block) for block in blocks]
    before = [
        [
            (
                prev.gid or 0,
                prev.span,
                plan.links.delay(placement.device(prev), devices[gid], block.nbytes.get(prev, 0)),
            )
            for prev in block.before
        ]
        for gid, block in enumerate(blocks)
    ]
    times: list[list[Number]] = [[0] * len(row) for row in starts]
    free: list[Number] = [0] * placement.ndevs
    for _, mid, gid in sorted((at, mid, gid) for gid, row in enumerate(starts) for mid, at in enumerate(row)):
        at: Number = 0
        for dev in devices[gid]:
            at = max(at, free[dev])
        for prev, span, delay in before[gid]:
            at = max(at, times[prev][mid] + span + delay)
        times[gid][mid] = at
        for dev in devices[gid]:
            free[dev] = at + blocks[gid].span
    return times


def build_plan(like: SchedPlan, placement: SchedPlan, times: list[list[Number]]) -> SchedPlan:
    """A plan of copies of the placement's blocks at these times."""
    plan = SchedPlan(placement.ndevs)
    plan.links, plan.memory, plan.placement = like.links, like.memory, placement
    plan.pattern, plan.proof = like.pattern, like.proof
    originals = sorted(placement, key=lambda block: block.gid or 0)
    edges = [[(prev.gid or 0, block.nbytes.get(prev, 0)) for prev in block.before] for block in originals]
    devices = [placement.device(block) for block in originals]
    copies: list[list[Block]] = [[block.like(mid) for block in originals] for mid in range(len(times[0]))]
    for at, mid, gid in sorted((at, mid, gid) for gid, row in enumerate(times) for mid, at in enumerate(row)):
        plan.add_block(copies[mid][gid], devices[gid], at)
    for row in copies:
        for block, prevs in zip(row, edges):
            for prev, nbytes in prevs:
                Block.make_dependency(row[prev], block, nbytes)
    return plan


def _ticks(problem: PlacementProblem, value: Number) -> int:
    return round(Fraction(value) / problem.unit)
