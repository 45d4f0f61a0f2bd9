"""Initial candidates with one stage per worker, the input of refinement.

Usually the best contiguous cuts of several orders. Where pins or memory rule those out, a candidate that satisfies only
the pins; refinement then restores balance and memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from gemini.errors import PartitionError
from gemini.partition.exact.contiguous import Cuts, find_fastest, find_narrowest
from gemini.partition.exact.device_order import StageSlots, slot_orders
from gemini.partition.exact.prefix_costs import SegmentCosts
from gemini.partition.item_orders import item_orders, order_by_pins, order_pinned_workers, random_topological_order
from gemini.partition.local_search.score import Candidate, evaluate
from gemini.partition.partition_problem import Problem

_SLOT_ORDERS = 24


def check_size(problem: Problem) -> None:
    """Raise PartitionError where there are fewer items than parts."""
    if problem.nparts > len(problem.items):
        raise PartitionError(
            f"{len(problem.items)} items cannot fill {problem.nparts} parts\n"
            f"    → request {len(problem.items)} parts or fewer"
        )


def initial_candidates(problem: Problem, rng: random.Random, drawn: int = 2) -> list[Candidate]:
    """Return initial candidates, the best first; `drawn` random orders are cut, too."""
    check_size(problem)
    orders = dict(item_orders(problem))
    if any(item.pin is not None for item in problem.items):
        orders["pinned"] = tuple(order_by_pins(problem))
    orders.update({f"random {at}": tuple(random_topological_order(problem, rng)) for at in range(drawn)})
    found = list(contiguous_candidates(problem, orders))
    if not found and problem.has_memory_limits:
        found = [
            evaluate(problem, candidate.stage_of, candidate.worker_of, candidate.origin)
            for candidate in contiguous_candidates(_without_memory_limits(problem), orders)
        ]
    if not found:
        found = list(_candidates_from_pins(problem))
    return sorted(found, key=lambda candidate: candidate.key)


def _without_memory_limits(problem: Problem) -> Problem:
    workers = tuple(replace(worker, memory_mb=None) for worker in problem.workers)
    return replace(problem, options=replace(problem.options, workers=workers))


def contiguous_candidates(problem: Problem, orders: dict[str, tuple[int, ...]]) -> Iterator[Candidate]:
    """Yield the best contiguous cuts of each order: the fastest, and those with the fewest bytes within the slack."""
    tables = list(islice(slot_orders(problem), _SLOT_ORDERS))
    for name, order in orders.items():
        costs = SegmentCosts(problem, order)
        best: tuple[StageSlots, Cuts] | None = None
        for slots in tables:
            found = find_fastest(costs, slots, best[1].ms if best else float("inf"))
            if found is not None and (best is None or found.ms < best[1].ms):
                best = slots, found
        if best is None:
            continue
        slots, tight = best
        yield _candidate(problem, costs, slots, tight, name)
        narrow = find_narrowest(costs, slots, tight.ms * (1 + problem.options.slack))
        if narrow is not None and narrow.at != tight.at:
            yield _candidate(problem, costs, slots, narrow, name)


def _candidate(problem: Problem, costs: SegmentCosts, slots: StageSlots, cuts: Cuts, name: str) -> Candidate:
    stage_of = [0] * len(problem.items)
    for stage in range(len(slots)):
        for at in range(cuts.at[stage], cuts.at[stage + 1]):
            stage_of[costs.order[at]] = stage
    return evaluate(problem, stage_of, [slot.worker for slot in slots], f"contiguous, {name} order")


def _candidates_from_pins(problem: Problem) -> Iterator[Candidate]:
    """Yield candidates with every item as early as edges and pins allow, unpinned workers last, in between or first."""
    pinned = order_pinned_workers(problem)
    free = [worker for worker in range(problem.nparts) if worker not in pinned]
    tables: list[Sequence[int]] = [[*pinned, *free], [*pinned[:-1], *free, *pinned[-1:]], [*free, *pinned]]
    for workers in tables:
        rank = {worker: at for at, worker in enumerate(workers)}
        stage_of: list[int] = []
        for at, item in enumerate(problem.items):
            if item.pin is not None:
                stage_of.append(rank[item.pin])
            else:
                stage_of.append(max((stage_of[before] for before in problem.predecessors[at]), default=0))
        yield evaluate(problem, stage_of, workers, "pins")
