"""The engine: METIS on the graph of items.

METIS knows undirected graphs with whole numbers as weights. An item weighs its time, an edge what cutting it would
move. A value that several items read moves once to each worker, not to each reader: its weight is shared among its
readers.
"""

from __future__ import annotations

from typing import Any

from gemini.errors import MissingEngineError
from gemini.partition.problem import Problem

_SCALE = 1_000_000  # the work of all items
_EDGE_SCALE = 10_000  # the heaviest edge


class Metis:
    """A problem as METIS sees it; each call is one try."""

    def __init__(self, problem: Problem) -> None:
        try:
            import pymetis
        except ImportError as error:
            raise MissingEngineError("pymetis", "metis", "the partitioner 'metis'") from error
        self.engine: Any = pymetis
        self.problem = problem
        total = sum(item.ms for item in problem.items) or 1.0
        self.weights = [round(item.ms / total * _SCALE) for item in problem.items]
        if not any(self.weights):
            self.weights = [1] * len(self.weights)
        self._adjacency()
        speeds = [worker.speed for worker in problem.workers]
        self.shares = [speed / sum(speeds) for speed in speeds]

    def _adjacency(self) -> None:
        between: dict[tuple[int, int], float] = {}
        for edge in self.problem.edges:
            between.setdefault((edge.source, edge.target), 0.0)
        for at, (producer, readers) in enumerate(self.problem.readers):
            price = _price(self.problem, at) / len(readers)
            for reader in readers:
                between[producer, reader] += price
        most = max(between.values(), default=0.0) or 1.0
        neighbours: list[list[tuple[int, int]]] = [[] for _ in self.problem.items]
        for (one, other), price in between.items():
            weight = max(1, round(price / most * _EDGE_SCALE))
            neighbours[one].append((other, weight))
            neighbours[other].append((one, weight))
        self.starts = [0]
        self.ends: list[int] = []
        self.edge_weights: list[int] = []
        for found in neighbours:
            self.ends += [other for other, _ in found]
            self.edge_weights += [weight for _, weight in found]
            self.starts.append(len(self.ends))

    def parts(self, seed: int, imbalance: int, recursive: bool) -> list[int]:
        """The part of each item; `imbalance` is in thousandths."""
        if self.problem.nparts == 1:
            return [0] * len(self.problem.items)
        options = self.engine.Options(seed=seed, ufactor=imbalance)
        _, part_of = self.engine.part_graph(
            self.problem.nparts,
            xadj=self.starts,
            adjncy=self.ends,
            vweights=self.weights,
            eweights=self.edge_weights,
            tpwgts=self.shares,
            recursive=recursive,
            options=options,
        )
        return list(part_of)


def _price(problem: Problem, value: int) -> float:
    """What cutting a value costs: ms where links do, else MB."""
    if problem.options.links.free or problem.nparts < 2:
        return problem.values[value].mb
    return problem.transfer_ms(value, 0, 1)
