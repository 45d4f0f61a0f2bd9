"""Lower bounds on the period, the makespan and the memory of any schedule.

For the period (time per micro-batch in the steady state), the largest of

- *work*: blocks that pairwise share a device take turns, so their spans add up;
- *residence*: a unit of memory allocated by block i and released by block j is in use at least for the longest path
  from i to the end of j. With `cap` units on the device and `held` = Σ units × path, period ≥ held / cap;
- *residence beside barriers*: while a block that covers every device runs, no other block makes progress. Counting
  only executing time on the path, cap × (period − barriers) ≥ held.

For the makespan of N micro-batches: heads and tails around the same quantities.
All results are in the problem's integer time, as exact fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction

from gemini.schedule.block import Number
from gemini.schedule.placement_problem import PlacementProblem

_MAX_DENOMINATOR = 10**9


@dataclass(frozen=True)
class _Residence:
    """Memory residence of one micro-batch on a device: `Σ units × time`, and the number of units."""

    whole: Fraction
    executing: Fraction
    cap: Fraction
    head: int
    tail: int


def period_bound(problem: PlacementProblem) -> Fraction:
    """The least possible period of one micro-batch (of the kernel, divided by its copies)."""
    bounds = [Fraction(work_bound(problem))]
    barriers = sum(problem.span[block] for block in _barriers(problem))
    for residence in _residences(problem):
        bounds.append(residence.whole / residence.cap)
        bounds.append(barriers + residence.executing / residence.cap)
    return max(bounds) / problem.copies


def work_bound(problem: PlacementProblem) -> int:
    """The largest amount of serial work: that of a device, or of blocks that pairwise conflict."""
    best = max(problem.load)
    full = set(_barriers(problem))
    wide = [block for block, where in enumerate(problem.devices) if len(where) > 1 and block not in full]
    if not wide:
        return best
    sets = [frozenset(where) for where in problem.devices]
    for seed in wide:
        clique = [seed]
        rivals = sorted((b for b in range(problem.nblocks) if b != seed), key=lambda b: -problem.span[b])
        for block in rivals:
            if all(sets[block] & sets[member] for member in clique):
                clique.append(block)
        best = max(best, sum(problem.span[block] for block in clique))
    return best


def makespan_bound(problem: PlacementProblem, nmicros: int) -> int:
    """The least possible time for `nmicros` micro-batches (rounded up to whole ticks)."""
    bound = max(problem.critical_path, _idle_beside_barriers(problem, nmicros))
    for blocks in problem.on_device:
        if blocks:
            bound = max(bound, _one_device_bound(problem, blocks, nmicros))
    for residence in _residences(problem):
        held = math.ceil(residence.whole * nmicros / residence.cap)
        bound = max(bound, residence.head + held + residence.tail)
    return bound


def least_memory(problem: PlacementProblem, dev: int, period: Fraction) -> Fraction:
    """The memory below which device `dev` cannot sustain `period` (0 if unknown)."""
    unlimited = problem.with_caps([1e18] * problem.ndevs)
    residence = _residence(unlimited, dev)
    return residence.whole / (period * problem.copies) if residence else Fraction(0)


def _one_device_bound(problem: PlacementProblem, blocks: tuple[int, ...], nmicros: int) -> int:
    """The largest, over sets of blocks that start no earlier than `head` and end no later than `tail` before the end,
    of head + work + tail."""
    best = 0
    heads = sorted({problem.head[block] for block in blocks})[:16]
    tails = sorted({problem.tail[block] for block in blocks})[:16]
    for head in heads:
        for tail in tails:
            work = sum(problem.span[b] for b in blocks if problem.head[b] >= head and problem.tail[b] >= tail)
            if work:
                best = max(best, head + nmicros * work + tail)
    return best


def _idle_beside_barriers(problem: PlacementProblem, nmicros: int) -> int:
    """Barriers cannot fill the time before a device's first own block, nor the time after its last one: while a
    barrier runs, the blocks the device waits for do not. So the device is idle for that time, wherever barriers are."""
    barriers = set(_barriers(problem))
    if not barriers:
        return 0
    bare = [0 if block in barriers else span for block, span in enumerate(problem.span)]
    head, tail = [0] * problem.nblocks, [0] * problem.nblocks
    for block in problem.topological:
        head[block] = max((head[prev] + bare[prev] for prev, _ in problem.before[block]), default=0)
    for block in reversed(problem.topological):
        tail[block] = max((bare[later] + tail[later] for later, _ in problem.after[block]), default=0)
    best = 0
    for blocks, load in zip(problem.on_device, problem.load):
        own = [block for block in blocks if block not in barriers]
        if own:
            idle = min(head[block] for block in own) + min(tail[block] for block in own)
            best = max(best, idle + nmicros * load)
    return best


def _barriers(problem: PlacementProblem) -> list[int]:
    """Blocks that cover every device in use."""
    used = {dev for where in problem.devices for dev in where}
    return [block for block, where in enumerate(problem.devices) if len(where) == len(used)] if len(used) > 1 else []


def _residences(problem: PlacementProblem) -> Iterable[_Residence]:
    for dev in range(problem.ndevs):
        residence = _residence(problem, dev)
        if residence is not None:
            yield residence


def _residence(problem: PlacementProblem, dev: int) -> _Residence | None:
    """Return how long each micro-batch must occupy memory of `dev`; None if unlimited or not determined."""
    if not math.isfinite(problem.caps[dev]):
        return None
    takes = {block: _exact(problem.memory[block]) for block in problem.on_device[dev] if problem.memory[block] > 0}
    gives = {block: -_exact(problem.memory[block]) for block in problem.on_device[dev] if problem.memory[block] < 0}
    if not takes or sum(gives.values()) < sum(takes.values()):
        return None
    cap = _usable(_exact(problem.caps[dev]), [*takes.values(), *gives.values()])
    if not cap:
        return None
    barriers = set(_barriers(problem))
    whole = _residence_sum(problem, takes, gives, lambda block, delay: problem.span[block] + delay)
    busy = _residence_sum(problem, takes, gives, lambda block, _: 0 if block in barriers else problem.span[block])
    if whole is None or busy is None:
        return None
    head = min(problem.head[block] for block in takes)
    tail = min(problem.tail[block] for block in gives)
    return _Residence(whole, busy, cap, head, tail)


def _residence_sum(
    problem: PlacementProblem, takes: dict[int, Fraction], gives: dict[int, Fraction], length: Callable[[int, int], int]
) -> Fraction | None:
    """Σ units × longest path over a pairing of allocations with releases. Every pairing is a bound; the longest
    paths are paired first. None if some allocated unit has no release that must follow it."""
    left_take, left_give = dict(takes), dict(gives)
    pairs = []
    for take in takes:
        reach = _paths(problem, take, length)
        pairs += [(reach[give] + length(give, 0), take, give) for give in gives if give in reach]
    total = Fraction(0)
    for path, take, give in sorted(pairs, reverse=True):
        units = min(left_take[take], left_give[give])
        total += units * path
        left_take[take] -= units
        left_give[give] -= units
    return None if any(left_take.values()) else total


def _paths(problem: PlacementProblem, source: int, length: Callable[[int, int], int]) -> dict[int, int]:
    reach = {source: 0}
    for block in problem.topological:
        at = reach.get(block)
        if at is not None:
            for later, delay in problem.after[block]:
                reach[later] = max(reach.get(later, 0), at + length(block, delay))
    return reach


def _usable(cap: Fraction, amounts: list[Fraction]) -> Fraction:
    """The part of `cap` that sums of these amounts can fill: a multiple of their greatest common divisor."""
    denominator = math.lcm(*(amount.denominator for amount in amounts))
    if denominator > _MAX_DENOMINATOR:
        return cap
    common = Fraction(math.gcd(*(int(amount * denominator) for amount in amounts)), denominator)
    return math.floor(cap / common + Fraction(1, _MAX_DENOMINATOR)) * common


def _exact(value: Number) -> Fraction:
    return Fraction(value).limit_denominator(_MAX_DENOMINATOR) if math.isfinite(value) else Fraction(10**18)
