"""The engine: METIS on the graph of items.

METIS knows undirected graphs with whole numbers as weights. An item weighs its time, an edge what cutting it would
move. A value that several items read moves once to each worker, not to each reader: its weight is shared among its
readers.
"""

from __future__ import annotations

from typing import Any

from gemini.errors import MissingEngineError
from gemini.partition.partition_problem import Problem

_SCALE = 1_000_000  # the work of all items
_LEAST_SHARE = 0.2  # of an equal share
_FEW_ITEMS = 8  # a part
_FEW = 32  # items with work a part
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
        """The part of each item; `imbalance` is in thousandths."""
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
        """The graph in the form that this version of the engine takes."""
        form = getattr(self.engine, "CSRAdjacency", None)
        if form is None:
            return {"xadj": self.starts, "adjncy": self.ends}
        return {"adjacency": form(self.starts, self.ends)}


def _shares(problem: Problem) -> list[float]:
    """The share of the work of each part; parts that would get next to nothing make METIS fail, and so do unequal ones
    of a few items. What is balanced afterwards is balanced by speed."""
    speeds = [worker.speed for worker in problem.workers]
    if len(problem.items) < _FEW_ITEMS * problem.nparts:
        return [1 / len(speeds)] * len(speeds)
    shares = [max(speed / sum(speeds), _LEAST_SHARE / len(speeds)) for speed in speeds]
    return [share / sum(shares) for share in shares]


def _weights(problem: Problem, largest_share: float) -> list[int]:
    """Whole numbers for times. METIS cannot split work that a few items have between them, so where few have any, all
    get some, and none has more than fits into a part."""
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
    """What cutting a value costs: ms where links do, else MB."""
    if problem.options.links.free or problem.nparts < 2:
        return problem.values[value].mb
    return problem.transfer_ms(value, 0, 1)
