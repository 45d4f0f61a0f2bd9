"""Search state: a solution that moves modify. Items are in ordered blocks; each block belongs to a worker.

Along every edge block numbers never decrease, so the blocks in order are the model. An item may move to any block
between those of its predecessors and those of its successors:

    blocks      0     1     2     3     4
                ▲     ├── may move ──┤  ▲
           predecessor      item      successor

The state maintains each worker's time and the cut, and evaluates moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemini.partition.local_search.memory_excess import MemoryLedger
from gemini.partition.local_search.transfer_costs import TransferLedger
from gemini.partition.partition_problem import Problem

POWER = 8  # norm of the smoothed maximum: close to the maximum, yet every move towards balance lowers it


class SearchState:
    """Items in blocks, with loads, cut and memory."""

    def __init__(self, problem: Problem, block_of: Sequence[int], worker_of: Sequence[int]) -> None:
        self.problem = problem
        self.block_of, self.worker_of = list(block_of), tuple(worker_of)
        self.ms = [item.ms for item in problem.items]
        self.speeds = [worker.speed for worker in problem.workers]
        self.scale = problem.ideal_ms or 1.0
        self.loads = [0.0] * problem.nparts
        self.members = [0] * problem.nparts  # items per worker; `working`: those with compute time
        self.working = [0] * problem.nparts
        for at, block in enumerate(self.block_of):
            worker = self.worker_of[block]
            self.loads[worker] += self.ms[at] / self.speeds[worker]
            self.members[worker] += 1
            self.working[worker] += self.ms[at] > 0
        self.transfers = TransferLedger(problem, [self.worker_of[block] for block in self.block_of])
        for worker, ms in enumerate(self.transfers.loads()):
            self.loads[worker] += ms
        self.memory = MemoryLedger(problem, self.block_of, self.worker_of) if problem.has_memory_limits else None

    @property
    def bottleneck(self) -> float:
        """The time of the most loaded worker (ms)."""
        return max(self.loads)

    @property
    def cut(self) -> float:
        """The traffic between workers, in the unit of `TransferLedger`."""
        return self.transfers.cut

    # ── admissible moves ─────────────────────────────────────────────────────────────────────────────────────────────
    def span(self, at: int) -> tuple[int, int]:
        """Return the first and last block that the edges of an item allow."""
        block_of, problem = self.block_of, self.problem
        before, after = problem.predecessors[at], problem.successors[at]
        low = max([block_of[other] for other in before]) if before else 0
        high = min([block_of[other] for other in after]) if after else len(self.worker_of) - 1
        return low, high

    def targets(self, at: int, reach: int | None = None) -> Iterator[int]:
        """Yield blocks of other workers that an item may move to, at most `reach` blocks away."""
        low, high = self.span(at)
        if low == high:
            return
        block = self.block_of[at]
        worker, pin = self.worker_of[block], self.problem.items[at].pin
        if self.is_last(at):
            return
        if reach is not None:
            low, high = max(low, block - reach), min(high, block + reach)
        for target in range(low, high + 1):
            other = self.worker_of[target]
            if other != worker and (pin is None or pin == other):
                yield target

    def is_last(self, at: int) -> bool:
        """Return whether an item is its worker's last, or last with compute time: no worker may become idle."""
        worker = self.worker_of[self.block_of[at]]
        return self.members[worker] == 1 or (self.working[worker] == 1 and self.ms[at] > 0)

    # ── effects of a move ────────────────────────────────────────────────────────────────────────────────────────────
    def effect(self, at: int, target: int) -> tuple[float, dict[int, float]]:
        """Return the changes of the cut and of the loads if an item moves."""
        one, other = self.worker_of[self.block_of[at]], self.worker_of[target]
        cut, loads = self.transfers.effect(at, one, other)
        loads[one] = loads.get(one, 0.0) - self.ms[at] / self.speeds[one]
        loads[other] = loads.get(other, 0.0) + self.ms[at] / self.speeds[other]
        return cut, loads

    def balance_change(self, changes: dict[int, float]) -> float:
        """Return the change of the smoothed maximum of the loads; negative is better balance."""
        total = 0.0
        for worker, change in changes.items():
            load = self.loads[worker]
            total += ((load + change) / self.scale) ** POWER - (load / self.scale) ** POWER
        return total

    def peak_after(self, changes: dict[int, float]) -> float:
        """Return the highest load among the workers that change."""
        return max(self.loads[worker] + change for worker, change in changes.items())

    def excess(self, at: int, target: int) -> float:
        """Return the change of the memory excess (MB) if an item moves."""
        return self.memory.change(at, self.block_of[at], target) if self.memory is not None else 0.0

    def memory_excess(self) -> float:
        """Return the MB beyond the limits of all workers."""
        return sum(map(self.memory.excess, range(self.problem.nparts))) if self.memory is not None else 0.0

    def move(self, at: int, target: int) -> None:
        """Move an item."""
        source = self.block_of[at]
        one, other = self.worker_of[source], self.worker_of[target]
        if one != other:
            _, changes = self.effect(at, target)
            for worker, change in changes.items():
                self.loads[worker] += change
            self.transfers.move(at, one, other)
            self.members[one] -= 1
            self.members[other] += 1
            self.working[one] -= self.ms[at] > 0
            self.working[other] += self.ms[at] > 0
        if self.memory:
            self.memory.remove(at, source)
            self.memory.add(at, target)
        self.block_of[at] = target

    def renumber(self, order: Sequence[int]) -> None:
        """Renumber the blocks by an order."""
        number = {block: at for at, block in enumerate(order)}
        self.block_of = [number[block] for block in self.block_of]
        self.worker_of = tuple(self.worker_of[block] for block in order)
        if self.memory:
            self.memory = MemoryLedger(self.problem, self.block_of, self.worker_of)

    def workers(self) -> list[int]:
        """Return the worker of each item."""
        return [self.worker_of[block] for block in self.block_of]
