"""Memory of workers: what all stages of a worker take together, and by how much it is too much.

A worker holds the weights of its stages (shared ones once), what each stage keeps for backward for as many
micro-batches as 1F1B has in flight there, and the peak of the item that takes the most while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.problem import Problem, in_flight
from gemini.partition.search.clustering import ordered


def is_limited(problem: Problem) -> bool:
    """Whether any worker has a limit."""
    return any(worker.memory_mb is not None for worker in problem.workers)


def overflow(problem: Problem, stage_of: Sequence[int], worker_of: Sequence[int]) -> list[float]:
    """MB beyond the limit of each worker; stages in the order in which the partition will number them."""
    if not is_limited(problem):
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
        grown = item.saved_own_mb * self.shares[block]
        for value in item.saved_values:
            readers = self.kept[block].get(value, 0)
            grown += 0.0 if readers else self.problem.saved_mb[value] * self.shares[block]
            self.kept[block][value] = readers + 1
        for name in item.parameters:
            users = self.names[worker].get(name, 0)
            grown += 0.0 if users else self.sizes[name]
            self.names[worker][name] = users + 1
        self.steady[worker] += grown
        self.peaks[worker] = max(self.peaks[worker], item.peak_mb)

    def remove(self, at: int, block: int) -> None:
        """An item leaves a block."""
        item, worker = self.problem.items[at], self.worker_of[block]
        shrunk = item.saved_own_mb * self.shares[block]
        for value in item.saved_values:
            self.kept[block][value] -= 1
            shrunk += 0.0 if self.kept[block][value] else self.problem.saved_mb[value] * self.shares[block]
        for name in item.parameters:
            self.names[worker][name] -= 1
            shrunk += 0.0 if self.names[worker][name] else self.sizes[name]
        self.steady[worker] -= shrunk

    def excess(self, worker: int) -> float:
        """MB beyond a worker's limit."""
        limit = self.problem.workers[worker].memory_mb
        if limit is None:
            return 0.0
        return max(0.0, self.steady[worker] + self.peaks[worker] / self.batches - limit)

    def change(self, at: int, source: int, target: int) -> float:
        """How much the excess grows if an item moves."""
        one, other = self.worker_of[source], self.worker_of[target]
        peaks = self.peaks[other]
        before = self.excess(one) + self.excess(other)
        self.remove(at, source)
        self.add(at, target)
        after = self.excess(one) + self.excess(other)
        self.remove(at, target)
        self.add(at, source)
        self.peaks[other] = peaks
        return after - before
