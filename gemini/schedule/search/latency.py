"""The shortest path of each micro-batch through the devices, then the shortest period that preserves it.

One micro-batch is scheduled by itself as short as possible; that template is then repeated unchanged at the smallest
distance at which copies of it neither collide on a device nor exceed its memory.
"""

from __future__ import annotations

from fractions import Fraction

from gemini.schedule.placement_problem import PlacementProblem
from gemini.schedule.search.kernel import Kernel, keeps_rules
from gemini.schedule.search.list_scheduler import list_schedule
from gemini.schedule.search.steady_state import Steady


def latency_kernel(problem: PlacementProblem, reference: tuple[int, ...], bound: Fraction) -> Steady:
    """A rigid kernel: every micro-batch takes the least time found, copies follow as closely as they can."""
    starts, latency = _template(problem, reference)
    kernel = _repeat(problem, starts, latency)
    notes = [f"latency {float(problem.real(latency)):g}"]
    if latency > problem.critical_path:
        notes.append(f"the least possible is {float(problem.real(problem.critical_path)):g}")
    return Steady(kernel, "list scheduling for latency", bound, notes)


def _template(problem: PlacementProblem, reference: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Schedule one micro-batch by several priorities: longest remaining path, earliest start, least memory."""
    place = {block: index for index, block in enumerate(reference)}
    rules = (
        [[float(-problem.tail[block] - problem.span[block])] for block in range(problem.nblocks)],
        [[float(problem.head[block])] for block in range(problem.nblocks)],
        [[float(place[block])] for block in range(problem.nblocks)],
    )
    best: tuple[int, tuple[int, ...]] | None = None
    for priority in rules:
        for patience in (0, 100):
            listing = list_schedule(problem, priority, reference, patience)
            if listing is not None and (best is None or listing.makespan < best[0]):
                best = (listing.makespan, tuple(row[0] for row in listing.starts))
    if best is None:  # cannot happen: the reference order itself fits
        raise RuntimeError("the reference order does not fit the memory")
    return best[1], best[0]


def _repeat(problem: PlacementProblem, starts: tuple[int, ...], latency: int) -> Kernel:
    """The smallest distance at which copies fit. Whether they do only changes where an end meets a start."""
    busiest = max(problem.load)
    distances = {latency, busiest}
    for blocks in problem.on_device:
        for first in blocks:
            for second in blocks:
                reach = starts[first] + problem.span[first] - starts[second]
                for turns in range(1, reach // busiest + 1):
                    distances.add(-(-reach // turns))
    for length in sorted(distances):
        if length >= busiest:
            kernel = Kernel(length, starts)
            if keeps_rules(problem, kernel):
                return kernel
    return Kernel(latency, starts)
