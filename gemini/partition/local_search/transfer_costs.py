"""Transfer costs: the values sent between workers and their cost.

A value is sent once to each worker that reads it. With free links the cut is in MB and takes no time; otherwise it is
in ms, value and gradient, and occupies the reading worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.partition_problem import Problem


class TransferLedger:
    """Readers of each value by worker, updated as items move."""

    def __init__(self, problem: Problem, part_of: Sequence[int]) -> None:
        self.problem = problem
        self.part_of = list(part_of)
        self.makes: list[list[int]] = [[] for _ in problem.items]
        self.reads: list[list[int]] = [[] for _ in problem.items]
        self.producer = [producer for producer, _ in problem.readers]
        self.readers: list[dict[int, int]] = []
        for value, (producer, readers) in enumerate(problem.readers):
            self.makes[producer].append(value)
            count: dict[int, int] = {}
            for reader in readers:
                self.reads[reader].append(value)
                count[self.part_of[reader]] = count.get(self.part_of[reader], 0) + 1
            self.readers.append(count)
        self.free = problem.options.links.free
        self.uniform = not isinstance(problem.options.links.latency, tuple) and not isinstance(
            problem.options.links.bandwidth, tuple
        )
        self.prices = [self._price(value, 0, 1) for value in range(len(problem.values))] if self.uniform else []
        self.cut = sum(
            self.price(value, self.part_of[producer], worker)
            for value, producer in enumerate(self.producer)
            for worker in self.readers[value]
            if worker != self.part_of[producer]
        )

    def price(self, value: int, source: int, target: int) -> float:
        """Return the cost of sending a value and its gradient back."""
        return self.prices[value] if self.uniform else self._price(value, source, target)

    def _price(self, value: int, source: int, target: int) -> float:
        return self.problem.values[value].mb if self.free else self.problem.transfer_ms(value, source, target)

    def loads(self) -> list[float]:
        """Return each worker's transfer time (ms)."""
        return self.problem.transfer_times(self.part_of)

    def effect(self, at: int, one: int, other: int) -> tuple[float, dict[int, float]]:
        """Return the changes of the cut and of transfer times if an item moves from one worker to another."""
        if self.free:
            return self.change(at, one, other), {}
        cut = 0.0
        loads: dict[int, float] = {}
        for value, source, target, sign in self._changes(at, one, other):
            cost = sign * self.price(value, source, target)
            cut += cost
            loads[target] = loads.get(target, 0.0) + cost
        return cut, loads

    def change(self, at: int, one: int, other: int) -> float:
        """Return the change of the cut if an item moves, for uniform links."""
        prices, readers, part_of, producer = self.prices, self.readers, self.part_of, self.producer
        cut = 0.0
        for value in self.makes[at]:
            count = readers[value]
            if one in count:
                cut += prices[value]
            if other in count:
                cut -= prices[value]
        for value in self.reads[at]:
            owner, count = part_of[producer[value]], readers[value]
            if one != owner and count[one] == 1:
                cut -= prices[value]
            if other != owner and other not in count:
                cut += prices[value]
        return cut

    def _changes(self, at: int, one: int, other: int) -> list[tuple[int, int, int, int]]:
        """Return (value, source, target, ±1) of the transfers that begin or end."""
        found = []
        for value in self.makes[at]:
            for worker in self.readers[value]:
                if worker != one:
                    found.append((value, one, worker, -1))
                if worker != other:
                    found.append((value, other, worker, 1))
        for value in self.reads[at]:
            owner, count = self.part_of[self.producer[value]], self.readers[value]
            if one != owner and count[one] == 1:
                found.append((value, owner, one, -1))
            if other != owner and other not in count:
                found.append((value, owner, other, 1))
        return found

    def move(self, at: int, one: int, other: int) -> None:
        """Move an item from one worker to another."""
        self.cut += self.change(at, one, other) if self.uniform else self.effect(at, one, other)[0]
        for value in self.reads[at]:
            count = self.readers[value]
            count[other] = count.get(other, 0) + 1
            if count[one] == 1:
                del count[one]
            else:
                count[one] -= 1
        self.part_of[at] = other
