"""Shortage: how much memory is missing for a cut, and what would do without it.

Contiguous cuts are asked: they are what a pipeline has. The least amount that every worker would need more is found by
bisection over filling the workers in turn; what would do is tried before it is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemini.ir.graph import Graph
from gemini.partition.exact.contiguous import fill
from gemini.partition.exact.device_order import Seats, seatings
from gemini.partition.exact.prefix_costs import Line
from gemini.partition.item_orders import orders
from gemini.partition.partition_problem import Problem
from gemini.partition.problem_builder import build_problem
from gemini.profiling.profile_result import Profile

_EXACT_MB = 0.01
_MOST_PARTS = 64


@dataclass(frozen=True)
class Shortage:
    """What the best cut lacks: MB in total for the stage that lacks most."""

    missing_mb: float
    stage: int = 0
    worker: int = 0
    needs_mb: float = 0.0
    name: str = ""  # the first item of the stage


def shortage(problem: Problem) -> Shortage:
    """The least that is missing over contiguous cuts; nothing (0) where one fits."""
    best: Shortage | None = None
    for order in orders(problem).values():
        line = Line(problem, order)
        for seats in seatings(problem):
            found = _of_line(line, seats, best.missing_mb if best else None)
            if found is not None and (best is None or found.missing_mb < best.missing_mb):
                best = found
            if best is not None and best.missing_mb == 0:
                return best
    return best or Shortage(0.0)


def fits(problem: Problem) -> bool:
    """Whether contiguous cuts keep to the memory of the workers."""
    return any(
        fill(line, seats) is not None
        for line in (Line(problem, order) for order in orders(problem).values())
        for seats in seatings(problem)
    )


def _of_line(line: Line, seats: Seats, worth: float | None) -> Shortage | None:
    if fill(line, seats, 0.0) is not None:
        return Shortage(0.0)
    low, high = 0.0, sum(map(line.problem.held_mb, line.problem.parameters_mb)) + 1.0
    if worth is not None and fill(line, seats, worth) is None:
        return None
    while fill(line, seats, high) is None:
        high *= 2
    while high - low > _EXACT_MB:
        middle = (low + high) / 2
        low, high = (low, middle) if fill(line, seats, middle) is not None else (middle, high)
    cuts = fill(line, seats, high) or []
    lacking = max(range(len(seats)), key=lambda at: _excess(line, seats, cuts, at))
    needs = _memory(line, seats, cuts, lacking)
    name = line.problem.items[line.order[cuts[lacking]]].name
    return Shortage(_excess(line, seats, cuts, lacking), lacking, seats[lacking].worker, needs, name)


def _memory(line: Line, seats: Seats, cuts: list[int], at: int) -> float:
    return line.problem.memory_mb(line.order[cuts[at] : cuts[at + 1]], seats[at].in_flight)


def _excess(line: Line, seats: Seats, cuts: list[int], at: int) -> float:
    limit = seats[at].memory_mb
    return float("-inf") if limit is None else _memory(line, seats, cuts, at) - limit


# ── what would do ──────────────────────────────────────────────────────────────────────────────────────────────────
def shortage_text(graph: Graph, profile: Profile, problem: Problem) -> str:
    """What is missing and what would do; empty where contiguous cuts fit."""
    found = shortage(problem)
    if found.missing_mb <= 0:
        return ""
    limit = problem.workers[found.worker].memory_mb or 0.0
    text = (
        f"{graph.model_name} in {problem.nparts} parts does not fit the memory of the workers: at best stage "
        f"{found.stage} (from {found.name}) needs {_mb(found.needs_mb)} and worker {found.worker} "
        f"has {_mb(limit)}: {_mb(found.missing_mb)} too little"
    )
    remedies = list(_remedies(graph, profile, problem, found))
    return f"{text}\n    → {', or '.join(remedies)}"


def _mb(amount: float) -> str:
    return f"{amount:.1f} MB" if amount >= 1 else f"{amount * 1024:.3g} KB"


def _remedies(graph: Graph, profile: Profile, problem: Problem, found: Shortage) -> Iterator[str]:
    options = problem.options
    parts = _more_parts(problem)
    if parts:
        yield f"nparts={parts} fits"
    if not options.recompute:
        again = build_problem(graph, profile, problem.nparts, replace(options, recompute=True))
        if fits(again):
            yield "recompute=True fits"
        elif not parts and (parts := _more_parts(again)):
            yield f"recompute=True with nparts={parts} fits"
    for more in (2, 4, 8, 16):
        split = replace(problem, options=replace(options, micro_batches=options.micro_batches * more))
        if fits(split):
            yield f"micro_batches={options.micro_batches * more} fits"
            break
    yield f"give every worker {found.missing_mb:.1f} MB more"


def _more_parts(problem: Problem) -> int | None:
    """The fewest parts that fit, of workers like these."""
    limit = problem.workers[0].memory_mb
    if len(set(problem.workers)) != 1 or limit is None:
        return None
    if any(problem.memory_mb((item,), 1) > limit for item in range(len(problem.items))):
        return None  # no number of parts makes a single item smaller
    most = min(len(problem.items), _MOST_PARTS)
    for nparts in range(problem.nparts + 1, most + 1):
        workers = (problem.workers[0],) * nparts
        more = replace(problem, nparts=nparts, options=replace(problem.options, workers=workers, pins={}))
        if fits(more):
            return nparts
    return None
