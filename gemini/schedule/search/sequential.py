"""One micro-batch at a time: the order that needs the least memory, and the kernel it makes.

If this order does not fit, no schedule does; if it fits, there is always a result. The order is found
exactly, by a best-first walk over the sets of finished blocks whose cost is the worst excess over a device's memory.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from gemini.schedule.block import Number
from gemini.schedule.placement_problem import PlacementProblem, fits
from gemini.schedule.search.kernel import Kernel

_MOST_SETS = 20_000


@dataclass(frozen=True)
class Sequence:
    """An order of one micro-batch's blocks, the peak on each device, and whether no order has a smaller excess."""

    order: tuple[int, ...]
    peaks: tuple[Number, ...]
    proven: bool


def least_memory_order(problem: PlacementProblem) -> Sequence:
    """The order of one micro-batch whose worst excess over the devices' memory is smallest."""
    found = _best_first(problem)
    order = found if found is not None else _greedy(problem)
    return Sequence(order, _peaks(problem, order), found is not None)


def find_order(problem: PlacementProblem) -> Sequence:
    """An order of one micro-batch that fits the memory, or the one that comes closest where none does."""
    for order in (problem.topological, _greedy(problem)):
        peaks = _peaks(problem, order)
        if all(fits(peak, cap) for peak, cap in zip(peaks, problem.caps)):
            return Sequence(order, peaks, True)
    return least_memory_order(problem)


def sequential_kernel(problem: PlacementProblem, order: tuple[int, ...]) -> Kernel:
    """Micro-batches follow each other on every device; different devices work on different ones."""
    starts = [0] * problem.nblocks
    free = [0] * problem.ndevs
    first: dict[int, int] = {}
    for block in order:
        arrival = max((starts[prev] + problem.span[prev] + delay for prev, delay in problem.before[block]), default=0)
        starts[block] = max([arrival, *(free[dev] for dev in problem.devices[block])])
        for dev in problem.devices[block]:
            free[dev] = starts[block] + problem.span[block]
            first.setdefault(dev, starts[block])
    return Kernel(max(free[dev] - first[dev] for dev in first), tuple(starts))


def _peaks(problem: PlacementProblem, order: tuple[int, ...]) -> tuple[Number, ...]:
    held: list[Number] = [0] * problem.ndevs
    peaks: list[Number] = [0] * problem.ndevs
    for block in order:
        for dev in problem.devices[block]:
            held[dev] += problem.memory[block]
            peaks[dev] = max(peaks[dev], held[dev])
    return tuple(peaks)


def _best_first(problem: PlacementProblem) -> tuple[int, ...] | None:
    """Walk over sets of finished memory-holding blocks (all other blocks cost nothing and run as soon as possible)."""
    required = [sum(1 << prev for prev, _ in prevs) for prevs in problem.before]
    everything = (1 << problem.nblocks) - 1
    start = _run_free_blocks(problem, 0, required)
    queue: list[tuple[float, int, int]] = [(-math.inf, -start.bit_count(), start)]
    cost = {start: -math.inf}
    parent: dict[int, tuple[int, int]] = {}
    walked = 0
    while queue:
        worst, _, done = heapq.heappop(queue)
        if worst > cost[done]:
            continue
        if done == everything:
            return _unwind(problem, parent, done, required)
        walked += 1
        if walked > _MOST_SETS:
            return None
        held = _memory_in_use(problem, done)
        for block in range(problem.nblocks):
            if not done >> block & 1 and done & required[block] == required[block]:
                excess = max(held[dev] + problem.memory[block] - problem.caps[dev] for dev in problem.devices[block])
                after = _run_free_blocks(problem, done | 1 << block, required)
                reached = max(worst, excess)
                if reached < cost.get(after, math.inf):
                    cost[after] = reached
                    parent[after] = (done, block)
                    heapq.heappush(queue, (reached, -after.bit_count(), after))
    return None


def _run_free_blocks(problem: PlacementProblem, done: int, required: list[int]) -> int:
    """`done` with every block that is free to run and takes no memory: running it at once can only help."""
    changed = True
    while changed:
        changed = False
        for block in range(problem.nblocks):
            ready = not done >> block & 1 and done & required[block] == required[block]
            if ready and problem.memory[block] <= 0:
                done |= 1 << block
                changed = True
    return done


def _memory_in_use(problem: PlacementProblem, done: int) -> list[Number]:
    held: list[Number] = [0] * problem.ndevs
    for block in range(problem.nblocks):
        if done >> block & 1:
            for dev in problem.devices[block]:
                held[dev] += problem.memory[block]
    return held


def _unwind(
    problem: PlacementProblem, parent: dict[int, tuple[int, int]], done: int, required: list[int]
) -> tuple[int, ...]:
    choices = []
    while done in parent:
        done, block = parent[done]
        choices.append(block)
    order: list[int] = []
    seen = 0
    for choice in [*reversed(choices), None]:
        for ready in problem.topological:
            free = not seen >> ready & 1 and seen & required[ready] == required[ready]
            if free and problem.memory[ready] <= 0:
                order.append(ready)
                seen |= 1 << ready
        if choice is not None:
            order.append(choice)
            seen |= 1 << choice
    return tuple(order)


def _greedy(problem: PlacementProblem) -> tuple[int, ...]:
    """Of the blocks that are free to run, always the one that leaves its devices with most room."""
    waiting = [len(prevs) for prevs in problem.before]
    ready = [block for block, count in enumerate(waiting) if not count]
    held: list[Number] = [0] * problem.ndevs
    order = []
    while ready:
        block = min(
            ready,
            key=lambda b: (max(held[d] + problem.memory[b] - problem.caps[d] for d in problem.devices[b]), b),
        )
        ready.remove(block)
        order.append(block)
        for dev in problem.devices[block]:
            held[dev] += problem.memory[block]
        for later, _ in problem.after[block]:
            waiting[later] -= 1
            if not waiting[later]:
                ready.append(later)
    return tuple(order)
