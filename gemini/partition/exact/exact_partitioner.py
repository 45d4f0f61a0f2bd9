"""Partitioner `exact`: the least bottleneck, then the fewest bytes within the slack of it.

contiguous   always: segments of several item orders, over several worker orders
looped       instead, with several chunks per worker
convex       also, where it may help: CP-SAT over all acyclic stages; taken where it is faster than contiguous by more
             than the slack
mixed        instead, where another partitioner is faster than the best straight pipeline and several stages per worker
             are allowed
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemini.cpsat_library import has_cpsat
from gemini.errors import PartitionError
from gemini.partition.exact.chunked import find_fastest_chunks, find_narrowest_chunks
from gemini.partition.exact.contiguous import (
    ROUNDING,
    Cuts,
    bottleneck_bound,
    find_fastest,
    find_fitting_cuts,
    find_narrowest,
)
from gemini.partition.exact.convex import ConvexStages, find_convex, is_small, stage_domains
from gemini.partition.exact.device_order import StageSlots, looped_slots, slot_orders
from gemini.partition.exact.incumbents import match_incumbents
from gemini.partition.exact.plain_cuts import prefer_plain, worth_searching
from gemini.partition.exact.prefix_costs import SegmentCosts
from gemini.partition.infeasible import contradictory_pins
from gemini.partition.item_orders import item_orders
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_NEAR = 24  # items on either side of a cut that may change stages
_EFFORT = 1.0  # per search of convex stages, about seconds
_SLOT_ORDERS = 6  # worker orders searched for convex stages


@dataclass(frozen=True)
class SearchCase:
    """One item order with one worker order."""

    name: str
    costs: SegmentCosts
    slots: StageSlots


def partition_exact(problem: Problem) -> Assignment:
    """Return the optimum, or the best solution found with its gap; never slower than the other partitioners.

    With `noise`, plainer stages that are as fast within it.
    """
    found = search(problem)
    searches = worth_searching(problem, found, bound_ms(problem))
    return prefer_plain(problem, found, match_incumbents(problem, found, search) if searches else found)


def search(problem: Problem) -> Assignment:
    """Return the optimum of straight pipelines, or of looped ones where chunks are requested, with its gap."""
    costs_of = {name: SegmentCosts(problem, order) for name, order in item_orders(problem).items()}
    chunks = problem.options.chunks if problem.options.chunks > 1 or not problem.options.mixed else 2
    chunks = min(chunks, len(problem.items) // problem.nparts) if problem.nparts > 1 else 1
    if chunks > 1:
        return _search_looped(problem, costs_of, chunks)
    cases = [
        SearchCase(name, costs, slots)
        for slots in slot_orders(problem)
        for name, costs in costs_of.items()
        if find_fitting_cuts(costs, slots) is not None
    ]
    best = _least_bottleneck(cases)
    if best is None:
        raise PartitionError(_infeasible_text(problem, bool(cases)))
    chosen, cuts = _fewest_bytes(cases, best * (1 + problem.options.slack))
    found = _contiguous_assignment(problem, chosen, cuts, best)
    if not _may_be_faster(problem, best):
        return found
    if not has_cpsat():
        found.facts["note"] = "only contiguous stages were searched, since OR-tools is not installed"
        return found
    return _search_convex(problem, chosen, cuts, best) or found


def bound_ms(problem: Problem) -> float:
    """Return a lower bound on the time of the slowest worker."""
    largest = max((item.ms for item in problem.items), default=0.0)
    return max(problem.ideal_ms, largest / max(worker.speed for worker in problem.workers))


def _infeasible_text(problem: Problem, fits: bool) -> str:
    if not fits:
        return (
            f"no contiguous cuts into {problem.nparts} parts fit the memory of the workers\n"
            "    → allow more memory, request more parts, or try another partitioner"
        )
    return "\n".join(contradictory_pins(problem)) or (
        f"no contiguous cuts into {problem.nparts} parts satisfy all pins\n"
        "    → pin fewer scopes, or try a partitioner that mixes stages (mpipe)"
    )


# ── contiguous ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _least_bottleneck(cases: list[SearchCase]) -> float | None:
    """Return the least bottleneck of all cases."""
    best = float("inf")
    bounds = {id(case): bottleneck_bound(case.costs, case.slots) for case in cases}
    for case in sorted(cases, key=lambda case: bounds[id(case)]):
        if bounds[id(case)] > best:
            break
        found = find_fastest(case.costs, case.slots, best)
        if found is not None:
            best = min(best, found.ms)
    return best if best < float("inf") else None


def _fewest_bytes(cases: list[SearchCase], limit: float) -> tuple[SearchCase, Cuts]:
    """Return the case and cuts with the fewest bytes within the limit; the first of equal ones."""
    found = [(case, cuts) for case in cases if (cuts := find_narrowest(case.costs, case.slots, limit)) is not None]
    return min(found, key=lambda pair: pair[1].nbytes)


def _contiguous_assignment(problem: Problem, chosen: SearchCase, cuts: Cuts, best: float) -> Assignment:
    stages = [chosen.costs.order[a:b] for a, b in itertools.pairwise(cuts.at)]
    workers = [slot.worker for slot in chosen.slots]
    known = _has_uniform_links(problem)
    facts = {"method": "contiguous", "order": chosen.name, "optimal": known, "bound_ms": round(best, 6)}
    return _assignment(problem, _stage_of(problem, stages), workers, facts)


def _has_uniform_links(problem: Problem) -> bool:
    """Return whether transfers cost the same between all workers; otherwise the search assumes the cheapest link."""
    links = problem.options.links
    return not isinstance(links.latency, tuple) and not isinstance(links.bandwidth, tuple)


# ── looped ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _search_looped(problem: Problem, costs_of: dict[str, SegmentCosts], chunks: int) -> Assignment:
    slots = looped_slots(problem, chunks)
    found = {name: one for name, costs in costs_of.items() if (one := find_fastest_chunks(costs, slots)) is not None}
    if not found:
        raise PartitionError(
            f"no cuts into {problem.nparts} × {chunks} stages fit the memory of the workers and the pins\n"
            "    → allow more memory, request other chunks, or try another partitioner"
        )
    best = min(one.ms for one in found.values())
    limit = best * (1 + problem.options.slack)
    near = {
        name: find_narrowest_chunks(one, slots, limit)
        for name, one in found.items()
        if one.ms <= limit * (1 + ROUNDING)
    }
    name, chosen = min(near.items(), key=lambda pair: (pair[1].cut_mb, pair[1].ms))
    stages = [chosen.costs.order[a:b] for a, b in itertools.pairwise(chosen.at)]
    proven = all(one.proven for one in found.values()) or best <= bound_ms(problem) * (1 + ROUNDING)
    bound = best if proven else bound_ms(problem)
    facts = {"method": "looped", "chunks": chunks, "order": name, "optimal": proven, "bound_ms": round(bound, 6)}
    return _assignment(problem, _stage_of(problem, stages), [slot.worker for slot in slots], facts)


# ── convex ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _target(problem: Problem, contiguous: float) -> float:
    return contiguous / (1 + problem.options.slack) * (1 - ROUNDING)


def _may_be_faster(problem: Problem, contiguous: float) -> bool:
    """Return whether non-contiguous stages could be faster by more than the slack."""
    bound = bound_ms(problem)
    bounded = bound > _target(problem, contiguous) or contiguous <= bound * (1 + problem.options.near)
    return problem.nparts > 1 and contiguous > 0 and not bounded and not _is_chain(problem)


def _search_convex(problem: Problem, chosen: SearchCase, cuts: Cuts, contiguous: float) -> Assignment | None:
    """Return convex stages that are faster than contiguous ones by more than the slack, if any."""
    limit = _target(problem, contiguous)
    effort = min(_EFFORT, problem.options.time_limit)
    small = is_small(problem)
    best: tuple[ConvexStages, list[int]] | None = None
    orders_tried = slot_orders(problem)[:_SLOT_ORDERS] if small else [chosen.slots]
    for slots in orders_tried:
        if limit <= bound_ms(problem):
            break  # nothing is faster
        allowed = stage_domains(problem, chosen.costs.order, cuts.at, _NEAR)
        solution = find_convex(problem, slots, allowed, limit, effort)
        workers = [slot.worker for slot in slots]
        if solution is not None and max(problem.times([workers[stage] for stage in solution.stage_of])) <= limit:
            limit = solution.ms * (1 - ROUNDING)
            best = solution, workers
    if best is None:
        return None
    proven = best[0].proven and _has_uniform_links(problem) and len(orders_tried) == len(slot_orders(problem))
    bound = best[0].ms if proven else bound_ms(problem)
    facts = {"method": "convex", "optimal": proven, "bound_ms": round(bound, 6)}
    return _assignment(problem, best[0].stage_of, best[1], facts)


def _is_chain(problem: Problem) -> bool:
    """Return whether the items have only one topological order, so that all stages are segments of it."""
    return all(at + 1 in problem.successors[at] for at in range(len(problem.items) - 1))


# ── assignment ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _stage_of(problem: Problem, stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    found = [0] * len(problem.items)
    for stage, items in enumerate(stages):
        for item in items:
            found[item] = stage
    return tuple(found)


def _assignment(
    problem: Problem, stage_of: tuple[int, ...], workers: Sequence[int], facts: dict[str, Any]
) -> Assignment:
    part_of = [workers[stage] for stage in stage_of]
    bound = facts["bound_ms"]
    facts["gap"] = round(max(max(problem.times(part_of)) / bound - 1, 0.0), 6) if bound else 0.0
    facts["cut_mb"] = round(problem.cut_mb(part_of), 6)
    if list(workers) != list(range(problem.nparts)) and facts["method"] != "looped":
        facts["workers"] = list(workers)
    return Assignment(stage_of, tuple(workers), facts)
