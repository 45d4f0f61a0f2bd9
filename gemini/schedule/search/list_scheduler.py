"""List scheduling of a whole horizon: all micro-batches, one block after the other, under the memory limits.

Of all blocks whose inputs are ready, the one that can start first is scheduled; priorities break ties. A block with a
better priority that would otherwise be delayed may reserve its devices ahead of time (`patience`). A block allocates
memory only if every micro-batch in flight can still finish (the banker's rule), so the schedule never deadlocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gemini.schedule.block import Number
from gemini.schedule.placement_problem import PlacementProblem, fits

Starts = list[list[int]]
"""`starts[block][micro-batch]`."""


@dataclass(frozen=True)
class Listing:
    """A schedule of N micro-batches: when everything starts, and when the last block ends."""

    starts: Starts
    makespan: int


def list_schedule(
    problem: PlacementProblem, priority: Sequence[Sequence[float]], reference: Sequence[int], patience: int = 0
) -> Listing | None:
    """Schedule every micro-batch; `priority[block][micro-batch]`, smaller first.

    `reference` is an order of the blocks in which one micro-batch fits the memory by itself. With `patience` p in
    percent, a device waits up to p percent of a block's span for a block with a better priority.
    """
    return _Run(problem, priority, reference, patience).schedule()


class _Run:
    def __init__(
        self, problem: PlacementProblem, priority: Sequence[Sequence[float]], reference: Sequence[int], patience: int
    ) -> None:
        self.problem = problem
        self.priority = priority
        self.patience = patience
        self.nmicros = len(priority[0])
        self.next_micro = [0] * problem.nblocks
        self.missing = [[len(prevs)] * self.nmicros for prevs in problem.before]
        self.arrival: Starts = [[0] * self.nmicros for _ in range(problem.nblocks)]
        self.starts: Starts = [[-1] * self.nmicros for _ in range(problem.nblocks)]
        self.free = [0] * problem.ndevs
        self.ready: list[tuple[int, float, int]] = []
        self.waiting: list[set[int]] = [set() for _ in range(problem.ndevs)]
        self.blocked: list[set[int]] = [set() for _ in range(problem.ndevs)]
        self.vault = [_Vault(problem, dev, reference, self.next_micro) for dev in range(problem.ndevs)]

    def schedule(self) -> Listing | None:
        problem = self.problem
        for block in range(problem.nblocks):
            self._offer(block)
        left = problem.nblocks * self.nmicros
        while left:
            chosen = self._choose()
            if chosen is None:
                return None
            self._place(chosen)
            left -= 1
        return Listing(self.starts, max(self.free))

    def _offer(self, block: int) -> None:
        """Put the block's next micro-batch among the candidates if its inputs are ready."""
        micro = self.next_micro[block]
        if micro < self.nmicros and not self.missing[block][micro]:
            heapq.heappush(self.ready, (self._earliest(block), self.priority[block][micro], block))
            for dev in self.problem.devices[block]:
                self.waiting[dev].add(block)

    def _earliest(self, block: int) -> int:
        at = self.arrival[block][self.next_micro[block]]
        for dev in self.problem.devices[block]:
            at = max(at, self.free[dev])
        return at

    def _choose(self) -> int | None:
        while self.ready:
            at, rank, block = heapq.heappop(self.ready)
            if block not in self.waiting[self.problem.devices[block][0]]:
                continue  # already placed, or deferred until memory is released
            now = self._earliest(block)
            if now > at:
                heapq.heappush(self.ready, (now, rank, block))
            elif self._affordable(block):
                return self._find_claimant(block, at, rank) if self.patience else block
        return None

    def _affordable(self, block: int) -> bool:
        for dev in self.problem.devices[block]:
            if not self.vault[dev].grants(block, self.next_micro[block]):
                for home in self.problem.devices[block]:
                    self.waiting[home].discard(block)
                self.blocked[dev].add(block)
                return False
        return True

    def _find_claimant(self, block: int, at: int, rank: float) -> int:
        """The block with the best priority that this one would delay, or this one itself."""
        horizon = at + max(1, self.problem.span[block] * self.patience // 100)
        chosen, best = block, rank
        for dev in self.problem.devices[block]:
            for other in sorted(self.waiting[dev]):
                wish = self.priority[other][self.next_micro[other]]
                if wish < best and self._earliest(other) < horizon and self._affordable(other):
                    chosen, best = other, wish
        if chosen != block:  # it was taken off the heap and stays a candidate
            heapq.heappush(self.ready, (at, rank, block))
        return chosen

    def _place(self, block: int) -> None:
        problem, micro = self.problem, self.next_micro[block]
        at = self._earliest(block)
        end = at + problem.span[block]
        self.starts[block][micro] = at
        self.next_micro[block] += 1
        for dev in problem.devices[block]:
            self.free[dev] = end
            self.waiting[dev].discard(block)
            self.vault[dev].held += problem.memory[block]
        for later, delay in problem.after[block]:
            self.missing[later][micro] -= 1
            self.arrival[later][micro] = max(self.arrival[later][micro], end + delay)
            if self.next_micro[later] == micro:
                self._offer(later)
        self._offer(block)
        if problem.memory[block]:
            for dev in problem.devices[block]:
                again, self.blocked[dev] = self.blocked[dev], set()
                for other in sorted(again):
                    self._offer(other)


class _Vault:
    """The memory of one device, allocated by the banker's rule."""

    def __init__(self, problem: PlacementProblem, dev: int, reference: Sequence[int], next_micro: list[int]) -> None:
        place = {block: index for index, block in enumerate(reference)}
        self.memory = problem.memory
        self.cap = problem.caps[dev]
        self.held: Number = 0
        self.next_micro = next_micro
        self.blocks = sorted((b for b in problem.on_device[dev] if self.memory[b]), key=lambda b: place[b])
        self.need = self._need(self.blocks)

    def _need(self, blocks: Sequence[int]) -> Number:
        held: Number = 0
        need: Number = 0
        for block in blocks:
            held += self.memory[block]
            need = max(need, held)
        return need

    def grants(self, block: int, micro: int) -> bool:
        """Whether every micro-batch in flight could still finish, oldest first, after `block` took its memory."""
        amount = self.memory[block]
        if amount <= 0 or self.cap == float("inf") or fits(self.held + amount + self.need, self.cap):
            return True
        if not fits(self.held + amount, self.cap):
            return False
        # Flights between two of these counts have finished the same blocks and need the same memory to continue.
        counts = sorted({micro, micro + 1, *(self.next_micro[other] for other in self.blocks)})
        spare = self.cap - self.held - amount
        for first, after in pairwise(counts):
            kept: Number = 0
            left: list[int] = []
            for other in self.blocks:
                if first < self.next_micro[other] or (other == block and first == micro):
                    kept += self.memory[other]
                else:
                    left.append(other)
            returned = (after - first) * kept
            if left and not fits(self._need(left), spare + min(0, returned - kept)):
                return False
            spare += returned
        return True
