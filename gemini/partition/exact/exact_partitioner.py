"""The partitioner `exact`: the least bottleneck first, then the fewest bytes within the slack of it.

contiguous   always: stretches of several orders of items, over several orders of workers
looped       instead, with several chunks a worker
convex       also, where it may help: CP-SAT over all stages in which values flow forward; taken where it is faster
             than contiguous by more than the slack
mixed        instead, where others are faster than the best straight pipe and several stages a worker are allowed
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemini.errors import PartitionError
from gemini.partition.exact.chunked import fastest_chunks, narrowest_chunks
from gemini.partition.exact.contiguous import ROUNDING, Cuts, fastest, fill, lower_bound, narrowest
from gemini.partition.exact.convex import Convex, domains, find_convex, is_small
from gemini.partition.exact.cpsat import has_solver
from gemini.partition.exact.device_order import Seats, looped, seatings
from gemini.partition.exact.incumbents import not_slower
from gemini.partition.exact.prefix_costs import Line
from gemini.partition.infeasible import contradictory_pins
from gemini.partition.item_orders import orders
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_NEAR = 24  # items on either side of a cut that may change stages
_EFFORT = 1.0  # of one search of convex stages, about seconds
_SEATINGS = 6  # orders of workers that convex stages are searched for


@dataclass(frozen=True)
class Try:
    """One order of items, one order of workers."""

    name: str
    line: Line
    seats: Seats


def partition_exact(problem: Problem) -> Assignment:
    """The optimum, or the best found with how far it may be off; never slower than what others answer."""
    found = searched(problem)
    enough = bound_ms(problem) * (1 + max(ROUNDING, problem.options.near))
    is_enough = _time(problem, found) <= enough or not problem.options.rivals
    return found if is_enough else not_slower(problem, found, searched)


def searched(problem: Problem) -> Assignment:
    """The optimum of straight pipes, or of looped ones where chunks are asked for, or how far it may be off."""
    lines = {name: Line(problem, order) for name, order in orders(problem).items()}
    chunks = problem.options.chunks if problem.options.chunks > 1 or not problem.options.mixed else 2
    chunks = min(chunks, len(problem.items) // problem.nparts) if problem.nparts > 1 else 1
    if chunks > 1:
        return _looped(problem, lines, chunks)
    tries = [
        Try(name, line, seats)
        for seats in seatings(problem)
        for name, line in lines.items()
        if fill(line, seats) is not None
    ]
    best = _least(tries)
    if best is None:
        raise PartitionError(_impossible(problem, bool(tries)))
    chosen, cuts = _fewest(tries, best * (1 + problem.options.slack))
    found = _contiguous(problem, chosen, cuts, best)
    if not _may_be_faster(problem, best):
        return found
    if not has_solver():
        found.facts["note"] = "only contiguous stages were searched, since OR-tools is not installed"
        return found
    return _convex(problem, chosen, cuts, best) or found


def _time(problem: Problem, found: Assignment) -> float:
    return max(problem.times([found.worker_of[stage] for stage in found.stage_of]))


def bound_ms(problem: Problem) -> float:
    """A time that the slowest worker cannot go below."""
    largest = max((item.ms for item in problem.items), default=0.0)
    return max(problem.ideal_ms, largest / max(worker.speed for worker in problem.workers))


def _impossible(problem: Problem, fits: bool) -> str:
    if not fits:
        return (
            f"no contiguous cuts into {problem.nparts} parts fit the memory of the workers\n"
            "    → allow more memory, ask for more parts, or try another partitioner"
        )
    return "\n".join(contradictory_pins(problem)) or (
        f"no contiguous cuts into {problem.nparts} parts serve all pins\n"
        "    → pin fewer scopes, or try a partitioner that mixes stages (mpipe)"
    )


# ── contiguous ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _least(tries: list[Try]) -> float | None:
    """The least bottleneck of all."""
    best = float("inf")
    bounds = {id(one): lower_bound(one.line, one.seats) for one in tries}
    for one in sorted(tries, key=lambda one: bounds[id(one)]):
        if bounds[id(one)] > best:
            break
        found = fastest(one.line, one.seats, best)
        if found is not None:
            best = min(best, found.ms)
    return best if best < float("inf") else None


def _fewest(tries: list[Try], limit: float) -> tuple[Try, Cuts]:
    """The try and its cuts with the fewest bytes within the limit; the first of equals."""
    found = [(one, cuts) for one in tries if (cuts := narrowest(one.line, one.seats, limit)) is not None]
    return min(found, key=lambda pair: pair[1].nbytes)


def _contiguous(problem: Problem, chosen: Try, cuts: Cuts, best: float) -> Assignment:
    stages = [chosen.line.order[a:b] for a, b in itertools.pairwise(cuts.at)]
    workers = [seat.worker for seat in chosen.seats]
    known = _has_one_price(problem)
    facts = {"method": "contiguous", "order": chosen.name, "optimal": known, "bound_ms": round(best, 6)}
    return _assignment(problem, _stage_of(problem, stages), workers, facts)


def _has_one_price(problem: Problem) -> bool:
    """Whether moving a value costs the same between all workers; else the search took the cheapest."""
    links = problem.options.links
    return not isinstance(links.latency, tuple) and not isinstance(links.bandwidth, tuple)


# ── looped ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _looped(problem: Problem, lines: dict[str, Line], chunks: int) -> Assignment:
    seats = looped(problem, chunks)
    found = {name: one for name, line in lines.items() if (one := fastest_chunks(line, seats)) is not None}
    if not found:
        raise PartitionError(
            f"no cuts into {problem.nparts} × {chunks} stages fit the memory of the workers and the pins\n"
            "    → allow more memory, ask for other chunks, or try another partitioner"
        )
    best = min(one.ms for one in found.values())
    limit = best * (1 + problem.options.slack)
    near = {
        name: narrowest_chunks(one, seats, limit) for name, one in found.items() if one.ms <= limit * (1 + ROUNDING)
    }
    name, chosen = min(near.items(), key=lambda pair: (pair[1].cut_mb, pair[1].ms))
    stages = [chosen.line.order[a:b] for a, b in itertools.pairwise(chosen.at)]
    proven = all(one.proven for one in found.values()) or best <= bound_ms(problem) * (1 + ROUNDING)
    bound = best if proven else bound_ms(problem)
    facts = {"method": "looped", "chunks": chunks, "order": name, "optimal": proven, "bound_ms": round(bound, 6)}
    return _assignment(problem, _stage_of(problem, stages), [seat.worker for seat in seats], facts)


# ── convex ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _target(problem: Problem, contiguous: float) -> float:
    return contiguous / (1 + problem.options.slack) * (1 - ROUNDING)


def _may_be_faster(problem: Problem, contiguous: float) -> bool:
    """Whether other than contiguous stages could be faster by more than the slack."""
    bound = bound_ms(problem)
    bounded = bound > _target(problem, contiguous) or contiguous <= bound * (1 + problem.options.near)
    return problem.nparts > 1 and contiguous > 0 and not bounded and not _is_chain(problem)


def _convex(problem: Problem, chosen: Try, cuts: Cuts, contiguous: float) -> Assignment | None:
    """Stages that are no stretches, where they are faster than contiguous ones by more than the slack."""
    limit = _target(problem, contiguous)
    effort = min(_EFFORT, problem.options.time_limit)
    small = is_small(problem)
    best: tuple[Convex, list[int]] | None = None
    seatings_tried = seatings(problem)[:_SEATINGS] if small else [chosen.seats]
    for seats in seatings_tried:
        if limit <= bound_ms(problem):
            break  # nothing is faster
        allowed = domains(problem, chosen.line.order, cuts.at, _NEAR)
        answer = find_convex(problem, seats, allowed, limit, effort)
        workers = [seat.worker for seat in seats]
        if answer is not None and max(problem.times([workers[stage] for stage in answer.stage_of])) <= limit:
            limit = answer.ms * (1 - ROUNDING)
            best = answer, workers
    if best is None:
        return None
    proven = best[0].proven and _has_one_price(problem) and len(seatings_tried) == len(seatings(problem))
    bound = best[0].ms if proven else bound_ms(problem)
    facts = {"method": "convex", "optimal": proven, "bound_ms": round(bound, 6)}
    return _assignment(problem, best[0].stage_of, best[1], facts)


def _is_chain(problem: Problem) -> bool:
    """Whether there is but one order of the items, so that all stages are stretches of it."""
    return all(at + 1 in problem.successors[at] for at in range(len(problem.items) - 1))


# ── the answer ─────────────────────────────────────────────────────────────────────────────────────────────────────
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
