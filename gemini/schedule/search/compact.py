"""The shortest period that the order of a kernel allows.

A kernel fixes in which order every device takes its blocks, across micro-batches; memory depends on that order alone.
For a fixed order, start times obey `s_j ≥ s_i + time − length × turns` along every dependency and from every block
to the next on its device, and the least length is the largest ratio time / turns over all cycles of these edges. It is
found by raising the length to the ratio of a violated cycle until none is left (exact, a handful of rounds).

The ratio may be a fraction, such as 16/3: then three micro-batches make a kernel of 16.
"""

from __future__ import annotations

from fractions import Fraction

from gemini.schedule.placement_problem import PlacementProblem
from gemini.schedule.search.kernel import Kernel, keeps_rules

Edge = tuple[int, int, int, int]
"""(from, to, time, turns)."""

_MOST_ROUNDS = 60


def tightest(problem: PlacementProblem, kernel: Kernel, most_copies: int) -> Kernel:
    """The kernel with its own order at the least length, or itself where that gains nothing."""
    edges = _edges(problem, kernel)
    least = Fraction(max(problem.load))
    potentials: list[int] | None = None
    for _ in range(_MOST_ROUNDS):
        if least >= kernel.length:
            return kernel
        potentials, cycle = _longest_paths(problem.nblocks, edges, least)
        if cycle is None:
            break
        least = cycle
    if potentials is None or least >= kernel.length:
        return kernel
    repeats = least.denominator
    if repeats * kernel.copies > most_copies:
        length = -(-least.numerator // repeats)
        potentials, cycle = _longest_paths(problem.nblocks, edges, Fraction(length))
        if cycle is not None or length >= kernel.length:
            return kernel
        found = Kernel(length, tuple(potentials), kernel.copies)
        return found if keeps_rules(problem, found) else kernel
    # Rounding every start down to a whole tick preserves all whole-tick differences.
    starts = tuple((at + turn * least.numerator) // repeats for turn in range(repeats) for at in potentials)
    found = Kernel(least.numerator, starts, kernel.copies * repeats)
    return found if keeps_rules(problem.single().times(found.copies), found) else kernel


def _edges(problem: PlacementProblem, kernel: Kernel) -> list[Edge]:
    edges = [
        (prev, block, problem.span[prev] + delay, 0)
        for block, prevs in enumerate(problem.before)
        for prev, delay in prevs
    ]
    starts, length = kernel.starts, kernel.length
    for blocks in problem.on_device:
        ring = sorted(blocks, key=lambda block: starts[block] % length)
        for place, block in enumerate(ring):
            following = ring[(place + 1) % len(ring)]
            turns = starts[block] // length - starts[following] // length + (place + 1 == len(ring))
            edges.append((block, following, problem.span[block], turns))
    return edges


def _longest_paths(count: int, edges: list[Edge], length: Fraction) -> tuple[list[int], Fraction | None]:
    """Potentials in units of 1/denominator, and the ratio of a cycle that this length violates, if any."""
    over, under = length.numerator, length.denominator
    weighted = [(source, target, time * under - over * turns) for source, target, time, turns in edges]
    at = [0] * count
    parent = [-1] * count
    last = -1
    for _ in range(count + 1):
        last = -1
        for index, (source, target, weight) in enumerate(weighted):
            if at[source] + weight > at[target]:
                at[target] = at[source] + weight
                parent[target] = index
                last = target
        if last < 0:
            return at, None
    return at, _ratio(edges, parent, last, count)


def _ratio(edges: list[Edge], parent: list[int], last: int, count: int) -> Fraction:
    """Time over turns of the cycle that `last` was raised by."""
    for _ in range(count):
        last = edges[parent[last]][0]
    time = turns = 0
    block = last
    while True:
        source, _, span, turn = edges[parent[block]]
        time += span
        turns += turn
        block = source
        if block == last:
            return Fraction(time, turns)
