"""METIS call: partition the undirected graph of items.

METIS takes undirected graphs with integer weights. An item's weight is its time, an edge's weight its traffic. A value
with several readers is sent once per worker, not per reader: its weight is divided among its readers.
"""

from __future__ import annotations

from typing import Any

from gemini.errors import MissingEngineError
from gemini.partition.partition_problem import Problem

_SCALE = 1_000_000  # total weight of all items
_LEAST_SHARE = 0.2  # of an equal share
_FEW_ITEMS = 8  # per part
_FEW = 32  # items with compute time per part
_EDGE_SCALE = 10_000  # weight of the heaviest edge


class Metis:
    """A problem in the form of METIS; each call is one attempt."""

    def __init__(self, problem: Problem) -> None:
        try:
            import pymetis
        except ImportError as error:
            raise MissingEngineError("pymetis", "metis", "the partitioner 'metis'") from error
        self.engine: Any = pymetis
        self.problem = problem
        self.shares = _shares(problem)
        self.weights = _weights(problem, max(self.shares))
        self._adjacency()

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
        """Return the part of each item; `imbalance` is in thousandths."""
        if self.problem.nparts == 1:
            return [0] * len(self.problem.items)
        _, part_of = self.engine.part_graph(
            self.problem.nparts,
            vweights=self.weights,
            eweights=self.edge_weights,
            tpwgts=self.shares,
            recursive=recursive,
            options=self.engine.Options(seed=seed, ufactor=imbalance),
            **self._graph(),
        )
        return list(part_of)

    def _graph(self) -> dict[str, Any]:
        """Return the graph arguments for the installed version of pymetis."""
        form = getattr(self.engine, "CSRAdjacency", None)
        if form is None:
            return {"xadj": self.starts, "adjncy": self.ends}
        return {"adjacency": form(self.starts, self.ends)}


def _shares(problem: Problem) -> list[float]:
    """Return the target share of each part. METIS fails on tiny shares, and on unequal shares of few items; later
    refinement balances by speed."""
    speeds = [worker.speed for worker in problem.workers]
    if len(problem.items) < _FEW_ITEMS * problem.nparts:
        return [1 / len(speeds)] * len(speeds)
    shares = [max(speed / sum(speeds), _LEAST_SHARE / len(speeds)) for speed in speeds]
    return [share / sum(shares) for share in shares]


def _weights(problem: Problem, largest_share: float) -> list[int]:
    """Return integer weights for times. METIS cannot divide work concentrated in few items, so then all items get some
    weight, and none more than fits a part."""
    times = [item.ms for item in problem.items]
    if sum(ms > 0 for ms in times) < _FEW * problem.nparts:
        least = sum(times) / len(times) / 10 or 1.0
        times = [max(ms, least) for ms in times]
    rest, share = sum(times), largest_share
    for ms in sorted(times, reverse=True):
        if ms <= rest * share or share >= 1 or rest <= 0:
            break
        rest -= ms
        share = min(1.0, share / (1 - share))
    most = rest * share if rest > 0 else min(times)
    scale = _SCALE / sum(min(ms, most) for ms in times)
    return [round(min(ms, most) * scale) for ms in times]


def _price(problem: Problem, value: int) -> float:
    """Return the cost of cutting a value: ms where links have a cost, else MB."""
    if problem.options.links.free or problem.nparts < 2:
        return problem.values[value].mb
    return problem.transfer_ms(value, 0, 1)
