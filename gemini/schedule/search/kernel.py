"""A kernel: the steady state in integer time, and the rules it must satisfy.

Block i of repetition r starts at `starts[i] + r × length`. On a device of the steady state everything therefore
happens on a circle of circumference `length`, where block i sits at `starts[i] mod length`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from gemini.schedule.block import Number
from gemini.schedule.placement_problem import MEMORY_TOLERANCE, PlacementProblem, fits


@dataclass(frozen=True)
class Kernel:
    """Start times of all blocks of `copies` micro-batches, repeated every `length`."""

    length: int
    starts: tuple[int, ...]
    copies: int = 1

    @property
    def period(self) -> Fraction:
        """Time per micro-batch, in the problem's integer time."""
        return Fraction(self.length, self.copies)


def normalise(problem: PlacementProblem, kernel: Kernel) -> Kernel:
    """The same steady state with its first block at 0, independent flows aligned, and micro-batches in order.

    Flows that share no dependency (two replicas, or the micro-batches of a kernel) may be moved by whole kernels
    against each other, as long as each releases on every device the memory that it allocates there.
    """
    starts, length = list(kernel.starts), kernel.length
    flows = problem.flows
    if all(_is_balanced(problem, flow) for flow in flows):
        for flow in flows:
            turns = min(starts[block] for block in flow) // length
            for block in flow:
                starts[block] -= turns * length
    size = problem.nblocks // kernel.copies
    rows = sorted((starts[copy * size : (copy + 1) * size] for copy in range(kernel.copies)), key=min)
    first = min(rows[0])
    return Kernel(length, tuple(start - first for row in rows for start in row), kernel.copies)


def _is_balanced(problem: PlacementProblem, flow: frozenset[int]) -> bool:
    return not any(
        abs(sum(problem.memory[b] for b in blocks if b in flow)) > MEMORY_TOLERANCE for blocks in problem.on_device
    )


def steady_peak(problem: PlacementProblem, length: int, starts: Sequence[int] | Mapping[int, int], dev: int) -> Number:
    """The peak memory of `dev`, checked just after the start of each block that allocates."""
    blocks = [block for block in problem.on_device[dev] if problem.memory[block]]
    peak: Number = 0
    for taking in blocks:
        if problem.memory[taking] > 0:
            now = starts[taking]
            # By then block i has started (now − start) // length + 1 times more often than for micro-batch −1.
            held = sum(problem.memory[block] * ((now - starts[block]) // length + 1) for block in blocks)
            peak = max(peak, held)
    return peak


def keeps_rules(problem: PlacementProblem, kernel: Kernel) -> bool:
    """Whether the kernel respects dependencies, exclusivity and memory (a check independent of every search)."""
    starts, length = kernel.starts, kernel.length
    for block, prevs in enumerate(problem.before):
        if any(starts[block] < starts[prev] + problem.span[prev] + delay for prev, delay in prevs):
            return False
    for dev, blocks in enumerate(problem.on_device):
        placed = sorted((starts[block] % length, problem.span[block]) for block in blocks)
        for (offset, span), (following, _) in zip(placed, [*placed[1:], *((o + length, s) for o, s in placed[:1])]):
            if offset + span > following:
                return False
        if not fits(steady_peak(problem, length, starts, dev), problem.caps[dev]):
            return False
    return True
