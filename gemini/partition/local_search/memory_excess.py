"""Memory of workers: what all stages of a worker take together, and by how much it is too much.

A worker holds the weights of its stages (shared ones once), what each stage keeps for backward for as many
micro-batches as 1F1B has in flight there, and the peak of the item that takes the most while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.local_search.clusters import ordered
from gemini.partition.partition_problem import Problem, in_flight


def overflow(problem: Problem, stage_of: Sequence[int], worker_of: Sequence[int]) -> list[float]:
    """MB beyond the limit of each worker; stages in the order in which the partition will number them."""
    if not problem.has_memory_limits:
        return [0.0] * problem.nparts
    number = ordered(problem, stage_of)
    stages: list[list[int]] = [[] for _ in number]
    for at, stage in enumerate(stage_of):
        stages[number[stage]].append(at)
    found = problem.memories(stages, [worker_of[stage] for stage in sorted(number, key=lambda stage: number[stage])])
    return [
        max(0.0, mb - worker.memory_mb) if worker.memory_mb is not None else 0.0
        for mb, worker in zip(found, problem.workers, strict=True)
    ]


class MemoryBook:
    """The memory of each worker while items move between blocks, kept up to date item by item.

    Peaks only grow within one book, so it may say too much, never too little.
    """

    def __init__(self, problem: Problem, block_of: Sequence[int], worker_of: Sequence[int]) -> None:
        self.problem, self.worker_of = problem, worker_of
        batches = problem.options.micro_batches
        nblocks = len(worker_of)
        self.batches = batches
        self.shares = [in_flight(block, nblocks, batches) / batches for block in range(nblocks)]
        self.names: list[dict[str, int]] = [{} for _ in problem.workers]
        self.kept: list[dict[int, int]] = [{} for _ in worker_of]
        self.steady = [0.0] * problem.nparts
        self.peaks = [0.0] * problem.nparts
        self.sizes = {name: problem.held_mb(name) for name in problem.parameters_mb}
        for at, block in enumerate(block_of):
            self.add(at, block)

    def add(self, at: int, block: int) -> None:
        """An item enters a block."""
        item, worker = self.problem.items[at], self.worker_of[block]
        self.steady[worker] += self._grown(at, block)
        self.peaks[worker] = max(self.peaks[worker], item.peak_mb)
        for value in item.saved_values:
            self.kept[block][value] = self.kept[block].get(value, 0) + 1
        for name in item.parameters:
            self.names[worker][name] = self.names[worker].get(name, 0) + 1

    def remove(self, at: int, block: int) -> None:
        """An item leaves a block."""
        item, worker = self.problem.items[at], self.worker_of[block]
        self.steady[worker] -= self._shrunk(at, block)
        for value in item.saved_values:
            self.kept[block][value] -= 1
        for name in item.parameters:
            self.names[worker][name] -= 1

    def _grown(self, at: int, block: int) -> float:
        """MB that an item would add to a block: what nobody there holds already."""
        item, kept, names = self.problem.items[at], self.kept[block], self.names[self.worker_of[block]]
        saved = item.saved_own_mb + sum(
            self.problem.saved_mb[value] for value in item.saved_values if not kept.get(value)
        )
        return saved * self.shares[block] + sum(self.sizes[name] for name in item.parameters if not names.get(name))

    def _shrunk(self, at: int, block: int) -> float:
        """MB that a block would lose with an item: what nobody else there holds."""
        item, kept, names = self.problem.items[at], self.kept[block], self.names[self.worker_of[block]]
        saved = item.saved_own_mb + sum(self.problem.saved_mb[value] for value in item.saved_values if kept[value] == 1)
        return saved * self.shares[block] + sum(self.sizes[name] for name in item.parameters if names[name] == 1)

    def excess(self, worker: int, more: float = 0.0) -> float:
        """MB beyond a worker's limit, with some more than it has."""
        limit = self.problem.workers[worker].memory_mb
        if limit is None:
            return 0.0
        return max(0.0, self.steady[worker] + more + self.peaks[worker] / self.batches - limit)

    def change(self, at: int, source: int, target: int) -> float:
        """How much the excess grows if an item moves to a block of another worker."""
        one, other = self.worker_of[source], self.worker_of[target]
        peak = max(0.0, self.problem.items[at].peak_mb - self.peaks[other]) / self.batches
        left = self.excess(one, -self._shrunk(at, source)) - self.excess(one)
        return left + self.excess(other, self._grown(at, target) + peak) - self.excess(other)
