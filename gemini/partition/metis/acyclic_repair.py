"""Acyclic repair: make the parts of METIS executable as stages.

Parts are matched to workers by pins, empty parts are filled, and where every worker has one stage, parts are ordered
and items that violate the order are moved.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.item_orders import order_pinned_workers
from gemini.partition.partition_problem import Problem


def match_workers(problem: Problem, part_of: Sequence[int]) -> list[int]:
    """Return the worker of each item: parts are matched to workers by pinned items, and pins are applied."""
    pinned: dict[tuple[int, int], int] = {}
    for item, part in zip(problem.items, part_of, strict=True):
        if item.pin is not None:
            pinned[part, item.pin] = pinned.get((part, item.pin), 0) + 1
    worker_of: dict[int, int] = {}
    for part, worker in sorted(pinned, key=lambda pair: (-pinned[pair], pair)):
        if part not in worker_of and worker not in worker_of.values():
            worker_of[part] = worker
    for part in range(problem.nparts):  # other parts keep their number where it is free: shares follow speeds
        if part not in worker_of and part not in worker_of.values():
            worker_of[part] = part
    free = iter([worker for worker in range(problem.nparts) if worker not in worker_of.values()])
    for part in range(problem.nparts):
        if part not in worker_of:
            worker_of[part] = next(free)
    found = [worker_of[part] for part in part_of]
    return [found[at] if item.pin is None else item.pin for at, item in enumerate(problem.items)]


def fill_empty_parts(problem: Problem, part_of: Sequence[int]) -> list[int]:
    """Give every worker some work: an empty one takes the lightest item of the most loaded worker."""
    found = list(part_of)
    counted = [item.ms > 0 for item in problem.items]
    if sum(counted) < problem.nparts:
        counted = [True] * len(counted)
    for worker in range(problem.nparts):
        if any(part == worker and counted[at] for at, part in enumerate(found)):
            continue
        count = [0] * problem.nparts
        for at, part in enumerate(found):
            count[part] += counted[at]
        loads = problem.loads(found)
        able = [
            at for at, part in enumerate(found) if counted[at] and count[part] > 1 and problem.items[at].pin is None
        ]
        if able:
            most = max(able, key=lambda at: (loads[found[at]], -problem.items[at].ms, -at))
            found[most] = worker
    return found


def repair_to_sequence(problem: Problem, part_of: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return two repairs to one stage per worker: items moved to later stages, or to earlier ones."""
    workers = _order_workers(problem, part_of)
    rank = {worker: at for at, worker in enumerate(workers)}
    wanted = [rank[part] for part in part_of]
    pins = [None if item.pin is None else rank[item.pin] for item in problem.items]
    later: list[int] = []
    for at, before in enumerate(problem.predecessors):
        pin = pins[at]
        later.append(max([wanted[at], *(later[other] for other in before)]) if pin is None else pin)
    earlier = list(wanted)
    for at in reversed(range(len(earlier))):
        pin = pins[at]
        after = problem.successors[at]
        earlier[at] = min([wanted[at], *(earlier[other] for other in after)]) if pin is None else pin
    return [(_clamp_to_pins(problem, found, pins), list(workers)) for found in (later, earlier)]


def _clamp_to_pins(problem: Problem, stage_of: Sequence[int], pins: Sequence[int | None]) -> list[int]:
    """Clamp stages to the range that pins of predecessors and successors allow."""
    count = len(stage_of)
    ceiling = [10**9] * count
    for at in reversed(range(count)):
        pin = pins[at]
        least = min((ceiling[other] for other in problem.successors[at]), default=10**9)
        ceiling[at] = least if pin is None else min(pin, least)
    found: list[int] = []
    for at in range(count):
        pin = pins[at]
        floor = max((found[other] for other in problem.predecessors[at]), default=0)
        found.append(pin if pin is not None else max(floor, min(stage_of[at], ceiling[at])))
    return found


def _order_workers(problem: Problem, part_of: Sequence[int]) -> list[int]:
    """Order workers by the mean position of their work, as far as pins allow."""
    total = [0.0] * problem.nparts
    weight = [0.0] * problem.nparts
    for at, part in enumerate(part_of):
        ms = problem.items[at].ms + 1e-9
        total[part] += ms * at
        weight[part] += ms
    middle = [total[part] / weight[part] if weight[part] else float(len(part_of)) for part in range(problem.nparts)]
    fixed = order_pinned_workers(problem)
    pinned = iter(fixed)
    by_middle = sorted(range(problem.nparts), key=lambda part: (middle[part], part))
    return [next(pinned) if part in fixed else part for part in by_middle]
