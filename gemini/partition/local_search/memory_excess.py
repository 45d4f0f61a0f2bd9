"""Memory excess: the memory of each worker's stages, and the amount beyond its limit.

A worker stores the weights of its stages (shared ones once), the saved tensors of each stage for as many micro-batches
as 1F1B has in flight there, and the largest working memory of any item.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.local_search.clusters import number_in_order
from gemini.partition.partition_problem import Problem, in_flight


def memory_overflow(problem: Problem, stage_of: Sequence[int], worker_of: Sequence[int]) -> list[float]:
    """Return the MB beyond the limit of each worker, with stages in the partition's order."""
    if not problem.has_memory_limits:
        return [0.0] * problem.nparts
    number = number_in_order(problem, stage_of)
    stages: list[list[int]] = [[] for _ in number]
    for at, stage in enumerate(stage_of):
        stages[number[stage]].append(at)
    found = problem.worker_memory_mb(
        stages, [worker_of[stage] for stage in sorted(number, key=lambda stage: number[stage])]
    )
    return [
        max(0.0, mb - worker.memory_mb) if worker.memory_mb is not None else 0.0
        for mb, worker in zip(found, problem.workers, strict=True)
    ]


class MemoryLedger:
    """The memory of each worker, updated as items move between blocks.

    Peaks never shrink, so the ledger may overestimate, but never underestimate.
    """

    def __init__(self, problem: Problem, block_of: Sequence[int], worker_of: Sequence[int]) -> None:
        self.problem, self.worker_of = problem, worker_of
        batches = problem.options.micro_batches
        nblocks = len(worker_of)
        self.batches = batches
        self.shares = [in_flight(block, nblocks, batches) / batches for block in range(nblocks)]
        self.parameters: list[dict[str, int]] = [{} for _ in problem.workers]
        self.saved: list[dict[int, int]] = [{} for _ in worker_of]
        self.steady = [0.0] * problem.nparts
        self.peaks = [0.0] * problem.nparts
        self.sizes = {name: problem.parameter_state_mb(name) for name in problem.parameters_mb}
        for at, block in enumerate(block_of):
            self.add(at, block)

    def add(self, at: int, block: int) -> None:
        """Add an item to a block."""
        item, worker = self.problem.items[at], self.worker_of[block]
        self.steady[worker] += self._added_mb(at, block)
        self.peaks[worker] = max(self.peaks[worker], item.peak_mb)
        for value in item.saved_values:
            self.saved[block][value] = self.saved[block].get(value, 0) + 1
        for name in item.parameters:
            self.parameters[worker][name] = self.parameters[worker].get(name, 0) + 1

    def remove(self, at: int, block: int) -> None:
        """Remove an item from a block."""
        item, worker = self.problem.items[at], self.worker_of[block]
        self.steady[worker] -= self._removed_mb(at, block)
        for value in item.saved_values:
            self.saved[block][value] -= 1
        for name in item.parameters:
            self.parameters[worker][name] -= 1

    def _added_mb(self, at: int, block: int) -> float:
        """Return the MB that an item would add to a block: amounts not shared with its items."""
        item, saved_count, names = self.problem.items[at], self.saved[block], self.parameters[self.worker_of[block]]
        saved = item.saved_own_mb + sum(
            self.problem.saved_mb[value] for value in item.saved_values if not saved_count.get(value)
        )
        return saved * self.shares[block] + sum(self.sizes[name] for name in item.parameters if not names.get(name))

    def _removed_mb(self, at: int, block: int) -> float:
        """Return the MB that a block would lose with an item: amounts not shared with its other items."""
        item, saved_count, names = self.problem.items[at], self.saved[block], self.parameters[self.worker_of[block]]
        saved = item.saved_own_mb + sum(
            self.problem.saved_mb[value] for value in item.saved_values if saved_count[value] == 1
        )
        return saved * self.shares[block] + sum(self.sizes[name] for name in item.parameters if names[name] == 1)

    def excess(self, worker: int, more: float = 0.0) -> float:
        """Return the MB beyond a worker's limit, with `more` MB added."""
        limit = self.problem.workers[worker].memory_mb
        if limit is None:
            return 0.0
        return max(0.0, self.steady[worker] + more + self.peaks[worker] / self.batches - limit)

    def change(self, at: int, source: int, target: int) -> float:
        """Return the change of the total excess if an item moves to a block of another worker."""
        one, other = self.worker_of[source], self.worker_of[target]
        peak = max(0.0, self.problem.items[at].peak_mb - self.peaks[other]) / self.batches
        left = self.excess(one, -self._removed_mb(at, source)) - self.excess(one)
        return left + self.excess(other, self._added_mb(at, target) + peak) - self.excess(other)
