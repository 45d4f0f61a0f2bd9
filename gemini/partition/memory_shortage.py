"""Memory shortage: the memory that is missing for contiguous cuts, and remedies.

The least additional memory per worker is found by bisection over a greedy fill; remedies are checked before they are
proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemini.ir.graph import Graph
from gemini.partition.exact.contiguous import find_fitting_cuts
from gemini.partition.exact.device_order import StageSlots, slot_orders
from gemini.partition.exact.prefix_costs import SegmentCosts
from gemini.partition.item_orders import item_orders
from gemini.partition.partition_problem import Problem
from gemini.partition.problem_builder import build_problem
from gemini.profiling.profile_result import Profile

_EXACT_MB = 0.01
_MOST_PARTS = 64


@dataclass(frozen=True)
class Shortage:
    """The memory that the best cuts lack, at the stage that lacks most."""

    missing_mb: float
    stage: int = 0
    worker: int = 0
    needs_mb: float = 0.0
    name: str = ""  # the first item of the stage


def find_shortage(problem: Problem) -> Shortage:
    """Return the least shortage over contiguous cuts; 0 MB where cuts fit."""
    best: Shortage | None = None
    for order in item_orders(problem).values():
        costs = SegmentCosts(problem, order)
        for slots in slot_orders(problem):
            found = _shortage_of_order(costs, slots, best.missing_mb if best else None)
            if found is not None and (best is None or found.missing_mb < best.missing_mb):
                best = found
            if best is not None and best.missing_mb == 0:
                return best
    return best or Shortage(0.0)


def has_fitting_cuts(problem: Problem) -> bool:
    """Return whether any contiguous cuts fit the memory of the workers."""
    return any(
        find_fitting_cuts(costs, slots) is not None
        for costs in (SegmentCosts(problem, order) for order in item_orders(problem).values())
        for slots in slot_orders(problem)
    )


def _shortage_of_order(costs: SegmentCosts, slots: StageSlots, best_mb: float | None) -> Shortage | None:
    if find_fitting_cuts(costs, slots, 0.0) is not None:
        return Shortage(0.0)
    low, high = 0.0, sum(map(costs.problem.parameter_state_mb, costs.problem.parameters_mb)) + 1.0
    if best_mb is not None and find_fitting_cuts(costs, slots, best_mb) is None:
        return None
    while find_fitting_cuts(costs, slots, high) is None:
        high *= 2
    while high - low > _EXACT_MB:
        middle = (low + high) / 2
        low, high = (low, middle) if find_fitting_cuts(costs, slots, middle) is not None else (middle, high)
    cuts = find_fitting_cuts(costs, slots, high) or []
    lacking = max(range(len(slots)), key=lambda at: _excess(costs, slots, cuts, at))
    needs = _memory(costs, slots, cuts, lacking)
    name = costs.problem.items[costs.order[cuts[lacking]]].name
    return Shortage(_excess(costs, slots, cuts, lacking), lacking, slots[lacking].worker, needs, name)


def _memory(costs: SegmentCosts, slots: StageSlots, cuts: list[int], at: int) -> float:
    return costs.problem.memory_mb(costs.order[cuts[at] : cuts[at + 1]], slots[at].in_flight)


def _excess(costs: SegmentCosts, slots: StageSlots, cuts: list[int], at: int) -> float:
    limit = slots[at].memory_mb
    return float("-inf") if limit is None else _memory(costs, slots, cuts, at) - limit


# ── remedies ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def explain_shortage(graph: Graph, profile: Profile, problem: Problem) -> str:
    """Describe the missing memory and the remedies; empty where contiguous cuts fit."""
    found = find_shortage(problem)
    if found.missing_mb <= 0:
        return ""
    limit = problem.workers[found.worker].memory_mb or 0.0
    text = (
        f"{graph.model_name} in {problem.nparts} parts does not fit the memory of the workers: with the best cuts "
        f"stage {found.stage} (from {found.name}) needs {_mb(found.needs_mb)} and worker {found.worker} "
        f"has {_mb(limit)}: {_mb(found.missing_mb)} too little"
    )
    remedies = list(_remedies(graph, profile, problem, found))
    return f"{text}\n    → {', or '.join(remedies)}"


def _mb(amount: float) -> str:
    return f"{amount:.1f} MB" if amount >= 1 else f"{amount * 1024:.3g} KB"


def _remedies(graph: Graph, profile: Profile, problem: Problem, found: Shortage) -> Iterator[str]:
    options = problem.options
    parts = _find_fitting_nparts(problem)
    if parts:
        yield f"nparts={parts} fits"
    if not options.recompute:
        again = build_problem(graph, profile, problem.nparts, replace(options, recompute=True))
        if has_fitting_cuts(again):
            yield "recompute=True fits"
        elif not parts and (parts := _find_fitting_nparts(again)):
            yield f"recompute=True with nparts={parts} fits"
    for more in (2, 4, 8, 16):
        split = replace(problem, options=replace(options, micro_batches=options.micro_batches * more))
        if has_fitting_cuts(split):
            yield f"micro_batches={options.micro_batches * more} fits"
            break
    yield f"give every worker {found.missing_mb:.1f} MB more"


def _find_fitting_nparts(problem: Problem) -> int | None:
    """Return the fewest parts of identical workers that fit, or None."""
    limit = problem.workers[0].memory_mb
    if len(set(problem.workers)) != 1 or limit is None:
        return None
    if any(problem.memory_mb((item,), 1) > limit for item in range(len(problem.items))):
        return None  # no number of parts makes a single item smaller
    most = min(len(problem.items), _MOST_PARTS)
    for nparts in range(problem.nparts + 1, most + 1):
        workers = (problem.workers[0],) * nparts
        more = replace(problem, nparts=nparts, options=replace(problem.options, workers=workers, pins={}))
        if has_fitting_cuts(more):
            return nparts
    return None
